"""Replay of plain decoding, that is with prompt lookup but without a draft model, on a session's committed text.

The text does not depend on drafts. So for every place in it, one can tell what lookup would have proposed there, and
how much of that would have been accepted; and thus how many passes plain decoding would have taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.inference.speculation.lookup import Lookup
from specdec.inference.tokens import common_length


class Replay:
    """Prompt lookup of one session, and the passes that decoding without a draft model would have taken for its text.

    Such decoding uses prompt lookup, too. It is called plain here.

    Args:
        committed: the session's token ids, a list that grows.
        lookup: the prompt lookup; also an attribute. Its acceptance rates become those of plain decoding.
        limit: most tokens that plain decoding looks up for a pass; 0: none.
    """

    def __init__(self, committed: Sequence[int], lookup: Lookup, limit: int) -> None:
        self._committed = committed
        self.lookup = lookup
        self._place = len(committed)  # tokens that plain decoding would have had by now
        self._proposal: list[int] | None = None  # after that place; None: not looked up
        self._limit = limit

    def propose(self, limit: int) -> list[int]:
        """Return up to `limit` looked-up tokens that may follow the committed ones.

        They are the rest of an earlier proposal, if the text has followed that so far; else they are looked up now.
        """
        if not limit:
            return []
        num_ahead = len(self._committed) - self._place
        if self._proposal is None or self._proposal[:num_ahead] != self._committed[self._place :]:
            self.skip()
            num_ahead, self._proposal = 0, self.lookup.propose(self._committed, max(limit, self._limit))
        return self._proposal[num_ahead : num_ahead + limit]

    def skip(self) -> None:
        """Count the passes of decoding without a draft model from the present end of the text on, and none before."""
        self._place, self._proposal = len(self._committed), None

    def record(self, num_tokens: int, verified: tuple[int, int] | None, share: float) -> int:
        """Return how many passes the tokens of the latest pass would have taken without a draft model.

        Prompt lookup is used in these passes; its acceptance rates are updated. Tokens at the end of the text, where
        such a pass would depend on a token that is not known yet, are counted in a later call.

        Args:
            num_tokens: number of tokens that the pass committed.
            verified: number of tokens that lookup proposed for the pass, and how many were accepted; None if the pass
                verified tokens of a draft model.
            share: share of looked-up tokens that passes without a draft model verify.
        """
        if verified is not None and len(self._committed) - self._place == num_tokens:  # plain decoding's own pass
            self.lookup.record(*verified)
            self.skip()
            return 1
        num_passes = 0
        while (num_tokens := len(self._committed) - self._place) > 0:
            if self._proposal is None:
                self._proposal = self.lookup.propose(self._committed, self._limit, self._place) if self._limit else []
            tried = self._proposal[: round(share * len(self._proposal))]
            num_accepted = common_length(tried, self._committed[self._place :])
            if num_accepted == num_tokens:  # the next token, not known yet, decides
                break
            self.lookup.record(len(tried), num_accepted)
            self._place, self._proposal = self._place + num_accepted + 1, None
            num_passes += 1
        return num_passes
