"""Drafting without a model: what followed the last few tokens the last time they occurred (prompt lookup).

After Saxena, "Prompt Lookup Decoding" (2023), as in Transformers and vLLM. Deterministic, so it does not use the noise:
under sampling it is accepted as often as the target happens to choose the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inference.model import Draft
from inference.speculation.grammar import allowed_part, extend_within_grammar

MAX_NGRAM_LENGTH = 1 << 20
"""Tokens of a sequence that is still looked up; there is no KV to fill, only a search to keep short."""
MAX_MATCH = 4
MIN_MATCH = 1


class NgramProposer:
    """The `Proposer` over the sequence itself; any number of slots and any length cost it nothing."""

    def __init__(self, *, num_slots: int, max_length: int) -> None:
        self._num_slots = num_slots
        self._max_length = max_length

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def max_length(self) -> int:
        return self._max_length

    def extend(self, drafts: Sequence[Draft]) -> list[list[int] | None]:
        """Propose up to each draft's limit in one step, as far as its grammar allows."""
        return extend_within_grammar(drafts, _look_up, int)


def _look_up(drafts: Sequence[Draft]) -> list[list[int] | None]:
    return [allowed_part(draft, lookup(draft.token_ids, draft.limit)) for draft in drafts]


def lookup(token_ids: Sequence[int], limit: int) -> list[int]:
    """Up to `limit` tokens that followed the latest earlier occurrence of the longest suffix that has one."""
    sequence = np.asarray(token_ids, dtype=np.int64)
    for length in range(min(MAX_MATCH, len(sequence) - 1), MIN_MATCH - 1, -1):
        ends = _ends_of_suffix(sequence, length)
        if len(ends):
            continuation: list[int] = sequence[ends[-1] : ends[-1] + limit].tolist()
            return continuation
    return []


def _ends_of_suffix(sequence: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.intp]:
    """Where earlier occurrences of the last `length` tokens end (exclusive), ascending."""
    num_starts = len(sequence) - length
    matches = np.ones(num_starts, dtype=bool)
    for offset in range(length):
        matches &= sequence[offset : offset + num_starts] == sequence[num_starts + offset]
    return np.flatnonzero(matches) + length
