"""What one session's own tokens suggest that comes next, where no draft says anything, and how often that was right.

Text that repeats itself is guessed well, other text badly, and a short match worse than a long one: so each length of
match is judged by its own past, which fades, and a rate that is low allows few tokens, or by the widths that pay none.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from inference.scheduling.acceptance import Acceptance
from inference.scheduling.pacing import MIN_SURVIVAL
from inference.speculation.ngram import NgramIndex, continuation, match_length

_EDGES = (3, 8)  # lengths of matches from which on they are judged anew
_PRIOR_RATES = (0.1, 0.3, 0.6)
_PRIOR_TESTED = 2.0
_READ_AT_ONCE = 1024
"""Tokens taken into the index between two passes: a long prompt takes several."""


class Lookup:
    """Owned by the engine's loop, as its session is."""

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._acceptance = [Acceptance(_PRIOR_TESTED, rate) for rate in _PRIOR_RATES]
        self._match = 0

    @property
    def rate(self) -> float:
        """How likely a token of the latest proposal is right, if all before it are."""
        return self._acceptance[self._match].rate

    def read(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of a sequence that has grown, all but its last one at most."""
        self._index.read(token_ids, min(len(token_ids) - 1, self._index.num_read + _READ_AT_ONCE))

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens, no more than are right together with a probability of `MIN_SURVIVAL`."""
        self.read(token_ids)
        end = self._index.find(token_ids)
        if end is None:
            return []
        self._match = bisect.bisect(_EDGES, match_length(token_ids, end))
        return continuation(token_ids, end, min(limit, int(math.log(MIN_SURVIVAL) / math.log(self.rate))))

    def record(self, num_tokens: int, num_accepted_tokens: int) -> None:
        """Take in a pass, and what it made of the latest proposal; 0 tokens of it may have been verified."""
        for match, acceptance in enumerate(self._acceptance):
            was_tried = match == self._match
            acceptance.record(num_tokens * was_tried, num_accepted_tokens * was_tried)
