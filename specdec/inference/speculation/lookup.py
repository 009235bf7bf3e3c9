"""Prompt lookup: drafting without a model. It proposes the tokens that followed an earlier occurrence of the last few.

The method is Saxena's "Prompt Lookup Decoding" (2023), as in Transformers and vLLM. It is deterministic and does not
use the shared noise, so under sampling a token is accepted only if the target happens to draw it. `NgramProposer` takes
the place of a draft model. `Lookup` belongs to the target, for passes without tokens of a draft model.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.scheduling.acceptance import Acceptance
from specdec.inference.scheduling.pacing import MIN_SURVIVAL
from specdec.inference.speculation.grammar import allowed_part, extend_within_grammar
from specdec.inference.tokens import common_length, logged

MAX_NGRAM_LENGTH = 1 << 20
"""Longest sequence that is looked up, in tokens; there is no KV to fill, only an index to keep small."""
MATCHES = (3, 1)
"""Lengths of the n-grams that must have occurred before, in the order in which they are tried."""
LONGEST_MATCH = 8
"""Longest length of a match that is distinguished, in tokens; longer matches count as this long."""
_EDGES = (3, 8)  # shortest matches of the second and the third class
_PRIOR_RATES = (0.1, 0.3, 0.6)
_PRIOR_TESTED = 2.0
_READ_AT_ONCE = 1024
"""Most tokens indexed between two passes; a long prompt takes several."""


class NgramIndex:
    """Index of where each n-gram of a growing sequence ended last; constant time per token."""

    def __init__(self) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in MATCHES}
        self.num_read = 0

    def read(self, token_ids: Sequence[int], end: int) -> None:
        """Index the tokens up to position `end`; since the last call the sequence may only have grown."""
        first = max(0, self.num_read + 1 - max(MATCHES))
        piece = tuple(token_ids[first:end])
        for stop in range(self.num_read + 1, end + 1):
            for length, ends in self._ends.items():
                if stop >= length:
                    ends[piece[stop - length - first : stop - first]] = stop
        self.num_read = max(self.num_read, end)

    def find(self, token_ids: Sequence[int], num_tokens: int) -> int | None:
        """Return the position after the last n-gram's latest earlier occurrence in the first tokens; None if none."""
        last = tuple(token_ids[max(0, num_tokens - max(MATCHES)) : num_tokens])
        for length, ends in self._ends.items():
            end = ends.get(last[-length:]) if len(last) >= length else None
            if end is not None and end < num_tokens:
                return end
        return None


def continuation(token_ids: Sequence[int], end: int, limit: int, num_tokens: int) -> list[int]:
    """Return `limit` of the sequence's first `num_tokens` from `end` on; if there are fewer, repeat these."""
    piece = [*token_ids[end : min(end + limit, num_tokens)]]
    period = num_tokens - end
    while len(piece) < limit:
        piece.append(piece[-period])
    return piece


def match_length(token_ids: Sequence[int], end: int, num_tokens: int) -> int:
    """Return how many tokens right before `end` equal the last of the first `num_tokens`, at most `LONGEST_MATCH`."""
    length = 0
    while length < min(LONGEST_MATCH, end) and token_ids[end - 1 - length] == token_ids[num_tokens - 1 - length]:
        length += 1
    return length


class NgramProposer:
    """`Proposer` that looks tokens up in the sequence itself.

    It has no model, so its slots and lengths cost no memory.
    """

    def __init__(self, *, num_slots: int, max_length: int) -> None:
        self.num_slots, self.max_length, self.num_branches = num_slots, max_length, 0
        self._held: dict[int, tuple[NgramIndex, Sequence[int]]] = {}

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        """Propose up to each draft's limit in one step, as far as its grammar allows; no token has a runner-up."""
        return extend_within_grammar(drafts, self._look_up)

    def _look_up(self, drafts: Sequence[Draft]) -> list[list[DraftToken] | None]:
        return [[*map(DraftToken, allowed_part(draft, self._continuation(draft)))] for draft in drafts]

    def _continuation(self, draft: Draft) -> list[int]:
        token_ids, (log, _) = draft.token_ids, logged(draft.token_ids)
        index, held = self._held.get(draft.slot, (NgramIndex(), ()))
        if common_length(held, log) < len(held):  # another sequence
            index = NgramIndex()
        index.read(log, min(len(log), len(token_ids) - 1))
        self._held[draft.slot] = index, log
        end = index.find(token_ids, len(token_ids))
        return [] if end is None else continuation(token_ids, end, draft.limit, len(token_ids))


class Lookup:
    """Prompt lookup for one session of a target, and the acceptance rates of its proposals. Owned by the engine's loop.

    Text that repeats itself is predicted well and other text badly, and a long match is accepted more often than a
    short one. So each class of match lengths has its own acceptance rate, in which recent passes weigh most. The lower
    the rate, the fewer tokens are proposed.
    """

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._acceptance = [Acceptance(_PRIOR_TESTED, rate) for rate in _PRIOR_RATES]
        self._match = 0

    @property
    def rate(self) -> float:
        """Return the probability that a token of the latest proposal is accepted if all tokens before it are."""
        return self._acceptance[self._match].rate

    def read(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Index a part of the new ones of a growing sequence's first `num_tokens`; never the last of these."""
        self._index.read(token_ids, min(num_tokens - 1, self._index.num_read + _READ_AT_ONCE))

    def propose(self, token_ids: Sequence[int], limit: int, num_tokens: int | None = None) -> list[int]:
        """Return up to `limit` tokens, but only so many that all are accepted with probability `MIN_SURVIVAL`.

        Args:
            num_tokens: number of the sequence's first tokens, after which the proposal begins; None: all.
        """
        num_tokens = len(token_ids) if num_tokens is None else num_tokens
        self.read(token_ids, num_tokens)
        end = self._index.find(token_ids, num_tokens)
        if end is None:
            return []
        self._match = bisect.bisect(_EDGES, match_length(token_ids, end, num_tokens))
        limit = min(limit, int(math.log(MIN_SURVIVAL) / math.log(self.rate)))
        return continuation(token_ids, end, limit, num_tokens)

    def record(self, num_tokens: int, num_accepted_tokens: int) -> None:
        """Record a pass's verdict on the latest proposal; `num_tokens` is 0 if the pass verified none of its tokens."""
        for match, acceptance in enumerate(self._acceptance):
            was_tried = match == self._match
            acceptance.record(num_tokens * was_tried, num_accepted_tokens * was_tried)
