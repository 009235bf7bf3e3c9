"""Lookup: drafting without a model. It proposes the tokens that followed an earlier occurrence of the last few.

In the sequence itself this is Saxena's "Prompt Lookup Decoding" (2023), as in Transformers and vLLM. The same index
finds where an output is in another text that it may repeat: a prediction that its request came with, or earlier
answers. An earlier answer to the same prompt with the same seed was sampled with the same random numbers, so it is
repeated also at temperatures above 0. `NgramProposer` replaces a draft model. `Lookup` is used by the target.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.scheduling.acceptance import Acceptance, expected_tokens
from specdec.inference.scheduling.pacing import MIN_SURVIVAL
from specdec.inference.speculation.grammar import allowed_part, extend_within_grammar
from specdec.inference.speculation.suffix_index import LONGEST_MATCH, SuffixIndex
from specdec.inference.tokens import common_length, logged

MAX_NGRAM_LENGTH = 1 << 20
"""Longest sequence in which tokens are looked up, in tokens; it limits an index, since there is no KV cache."""
MATCHES = (3, 1)
"""Shortest matches in a sequence's own text, in tokens, in the order in which they are tried."""
PREDICTED_MATCH = 2
"""Shortest match in a prediction, in tokens; a short one, since the output is expected to follow the prediction."""
FIRST_TRY = 5
"""Most tokens that are proposed from a text with which the output has not agreed yet."""
_EDGES = (3, 8)  # shortest matches of the second and the third class
_OWN_RATES, _GUIDED_RATES = (0.1, 0.3, 0.6), (0.3, 0.7, 0.95)
_OWN_TESTED, _GUIDED_TESTED = 2.0, 1.0  # number of tests that these rates count as
_READ_AT_ONCE = 1024
"""Most tokens indexed between two passes; a long prompt is indexed over several passes."""


class OwnText:
    """Index of a growing sequence, which finds earlier occurrences of its last tokens."""

    def __init__(self) -> None:
        self._indexes = [SuffixIndex(num) for num in MATCHES]

    @property
    def num_read(self) -> int:
        """Return how many of the sequence's first tokens are indexed."""
        return self._indexes[0].end

    def read(self, token_ids: Sequence[int], end: int) -> None:
        """Index the tokens up to position `end`; since the last call the sequence may only have grown."""
        new = [*token_ids[self.num_read : end]]
        for index in self._indexes:
            index.append(new)

    def find(self, token_ids: Sequence[int], num_tokens: int) -> tuple[int, int]:
        """Find an earlier occurrence of the tokens right before position `num_tokens` of a sequence.

        Returns:
            The position after the occurrence, and how many tokens match: the longest match if any has at least
            `MATCHES[0]` tokens, else the latest occurrence of the last token; (0, 0) if that occurs nowhere.
        """
        last = _last(token_ids, num_tokens)
        found = self._indexes[0].find(last)
        return found if found[1] else self._indexes[1].find(last[-MATCHES[1] :])


def _last(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    return [*token_ids[max(0, num_tokens - LONGEST_MATCH) : num_tokens]]


def continuation(token_ids: Sequence[int], end: int, limit: int, num_tokens: int) -> list[int]:
    """Return the `limit` tokens that follow an earlier occurrence in a sequence; if there are fewer, they are repeated.

    Args:
        token_ids: the sequence.
        end: position of the first token after the occurrence; below `num_tokens`.
        limit: number of tokens to return.
        num_tokens: number of the sequence's first tokens, beyond which none is taken.
    """
    piece = [*token_ids[end : min(end + limit, num_tokens)]]
    period = num_tokens - end
    while len(piece) < limit:
        piece.append(piece[-period])
    return piece


class NgramProposer:
    """`Proposer` that looks tokens up in the sequence itself; it has no model, so its slots need no KV cache.

    Args:
        num_slots, max_length: as in `Proposer`.
    """

    def __init__(self, *, num_slots: int, max_length: int) -> None:
        self.num_slots, self.max_length, self.num_branches = num_slots, max_length, 0
        self._held: dict[int, tuple[OwnText, Sequence[int]]] = {}

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        """Propose as many tokens as each draft's limit and grammar allow; see `Proposer.extend`.

        No token has a runner-up, also if `ranked` is True.
        """
        return extend_within_grammar(drafts, self._look_up)

    def _look_up(self, drafts: Sequence[Draft]) -> list[list[DraftToken] | None]:
        return [[*map(DraftToken, allowed_part(draft, self._continuation(draft)))] for draft in drafts]

    def _continuation(self, draft: Draft) -> list[int]:
        token_ids, (log, _) = draft.token_ids, logged(draft.token_ids)
        text, held = self._held.get(draft.slot, (OwnText(), ()))
        if common_length(held, log) < len(held):  # another sequence
            text = OwnText()
        text.read(log, min(len(log), len(token_ids) - 1))
        self._held[draft.slot] = text, log
        end, _ = text.find(token_ids, len(token_ids))
        return continuation(token_ids, end, draft.limit, len(token_ids)) if end else []


class Guide:
    """Text other than the output itself that the output may repeat, and the place in it that the output has reached.

    Where output and text differ, the output is assumed to have replaced one token of the text, until a longer match
    shows where it goes on.

    Args:
        index: index of the text.
        place: place of the output's first token in the index; None if it is not known.
        num_tokens: number of the sequence's tokens before the output.
        unread: the whole text, if `index` is still empty: it is indexed part by part. Empty if the text is indexed.
        is_sure: True if the output should equal the text from `place` on. Otherwise at most `FIRST_TRY` tokens are
            proposed until output and text have agreed, so that a useless text costs little.

    Attributes:
        is_prediction: True if the request came with the text.
    """

    def __init__(
        self, index: SuffixIndex, place: int | None, num_tokens: int, unread: Sequence[int] = (), *, is_sure: bool
    ) -> None:
        self._index, self._place, self._num_seen = index, place, num_tokens
        self._unread, self.is_prediction = unread, bool(unread)
        self._length, self._is_sure = 0 if place is None else LONGEST_MATCH, is_sure

    @classmethod
    def predicted(cls, token_ids: Sequence[int], num_tokens: int) -> Guide:
        """Return a guide of which the text is a prediction, the output that the request expects.

        Args:
            token_ids: the prediction.
            num_tokens: number of the sequence's tokens before the output.
        """
        return cls(SuffixIndex(PREDICTED_MATCH), 0, num_tokens, token_ids, is_sure=False)

    def read(self) -> None:
        """Index a further part of the text, if it is not indexed yet."""
        place = self._index.end
        self._index.append(self._unread[place : place + _READ_AT_ONCE])

    def propose(self, token_ids: Sequence[int], num_tokens: int, limit: int) -> tuple[list[int], int]:
        """Look up what may follow a sequence's first `num_tokens` tokens.

        Returns:
            Up to `limit` tokens, and how many tokens right before them match the sequence's last ones.
        """
        self.read()
        self._follow(token_ids, num_tokens)
        if self._length < LONGEST_MATCH:
            place, length = self._index.find(_last(token_ids, num_tokens), self._place)
            if length > self._length:
                self._place, self._length, self._is_sure = place, length, True
        most = limit if self._is_sure else min(limit, FIRST_TRY)
        return ([] if self._place is None else self._index.tokens(self._place, most)), self._length

    def _follow(self, token_ids: Sequence[int], num_tokens: int) -> None:
        for each in token_ids[self._num_seen : num_tokens]:
            if self._place is not None:
                is_same = self._index.tokens(self._place, 1) == [each]
                self._length = min(LONGEST_MATCH, self._length + 1) if is_same else 0
                self._is_sure = self._is_sure or is_same
                self._place += 1
        self._num_seen = max(self._num_seen, num_tokens)


class Lookup:
    """Prompt lookup for one session of a target, in its own text and in others, with the proposals' acceptance rates.

    Text that repeats itself is predicted well and other text badly, and a long match is accepted more often than a
    short one. So for each text, matches are in three classes by length, each with its own acceptance rate, in which
    recent passes weigh most. The lower the rate, the fewer tokens are proposed. The text that promises most accepted
    tokens gives the proposal.

    Args:
        guides: other texts that the output may repeat, the likeliest first.
        own_limit: most tokens of a proposal from the session's own text; 0: none is looked up there.

    Attributes:
        guides: other texts that the output may repeat.
    """

    def __init__(self, guides: Sequence[Guide] = (), own_limit: int = MAX_NGRAM_LENGTH) -> None:
        self._text, self.guides, self._own_limit = OwnText(), guides, own_limit
        guided = [Acceptance(_GUIDED_TESTED, rate) for rate in _GUIDED_RATES * len(guides)]
        self._acceptance = [*guided, *(Acceptance(_OWN_TESTED, rate) for rate in _OWN_RATES)]
        self._match = 0

    @property
    def rate(self) -> float:
        """Return the probability that a token of the latest proposal is accepted if all before it are."""
        return self._acceptance[self._match].rate

    @property
    def is_guided(self) -> bool:
        """Return whether the latest proposal came from one of the other texts, and not from the session's own text."""
        return self._match < len(self.guides) * len(_GUIDED_RATES)

    @property
    def is_prediction(self) -> bool:
        """Return whether the latest proposal came from the prediction, the expected output in the request."""
        return self.is_guided and self.guides[self._match // len(_GUIDED_RATES)].is_prediction

    def read(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Index a further part of a sequence's first `num_tokens` tokens, except the last one, and of other texts."""
        if self._own_limit:
            self._text.read(token_ids, min(num_tokens - 1, self._text.num_read + _READ_AT_ONCE))
        for guide in self.guides:
            guide.read()

    def propose(self, token_ids: Sequence[int], limit: int, num_tokens: int | None = None) -> list[int]:
        """Return up to `limit` tokens, but only so many that all are accepted with at least probability `MIN_SURVIVAL`.

        Args:
            token_ids: the sequence.
            limit: most tokens of the proposal.
            num_tokens: number of the sequence's first tokens, after which the proposal begins; None: all.
        """
        num_tokens = len(token_ids) if num_tokens is None else num_tokens
        self.read(token_ids, num_tokens)
        best, most = [], 0.0
        for source, (found, length) in enumerate(self._found(token_ids, limit, num_tokens)):
            match = source * len(_GUIDED_RATES) + bisect.bisect(_EDGES, length)
            rate = self._acceptance[match].rate
            found = found[: int(math.log(MIN_SURVIVAL) / math.log(rate))]
            if (expected := expected_tokens(rate, len(found))) > most:
                best, most, self._match = found, expected, match
        return best

    def _found(self, token_ids: Sequence[int], limit: int, num_tokens: int) -> list[tuple[list[int], int]]:
        """Return, per text, what may follow a sequence's first `num_tokens` tokens, and how long the match is.

        The match is the number of tokens right before the found ones that equal the sequence's last ones. The session's
        own text comes last.
        """
        found = [guide.propose(token_ids, num_tokens, limit) for guide in self.guides]
        end, length = self._text.find(token_ids, num_tokens) if self._own_limit else (0, 0)
        own = continuation(token_ids, end, min(limit, self._own_limit), num_tokens) if end else []
        return [*found, (own, length)]

    def record(self, num_tokens: int, num_accepted_tokens: int) -> None:
        """Record a verdict on the latest proposal.

        Args:
            num_tokens: number of its tokens that the pass verified; 0 if none.
            num_accepted_tokens: number of these that were accepted.
        """
        for match, acceptance in enumerate(self._acceptance):
            acceptance.record(*((num_tokens, num_accepted_tokens) if match == self._match else (0, 0)))
