"""Drafting without a model: what followed the last few tokens the last time they occurred (prompt lookup).

After Saxena, "Prompt Lookup Decoding" (2023), as in Transformers and vLLM. Deterministic, so it does not use the noise:
under sampling it is accepted as often as the target happens to choose the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference.model.proposer import Draft, DraftToken
from inference.speculation.grammar import allowed_part, extend_within_grammar
from inference.tokens import common_length, logged

MAX_NGRAM_LENGTH = 1 << 20
"""Tokens of a sequence that is still looked up; there is no KV to fill, only an index to keep small."""
MATCHES = (3, 1)
"""How many last tokens must have stood before: first so many are tried, then so many."""
LONGEST_MATCH = 8
"""Longer ones are not told apart."""


class NgramIndex:
    """Where short pieces of one sequence that only grows ended last. Constant time per token and per question."""

    def __init__(self) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in MATCHES}
        self.num_read = 0

    def read(self, token_ids: Sequence[int], end: int) -> None:
        """Take in the tokens up to `end`; those that were taken in before must be the same."""
        first = max(0, self.num_read + 1 - max(MATCHES))
        piece = tuple(token_ids[first:end])
        for stop in range(self.num_read + 1, end + 1):
            for length, ends in self._ends.items():
                if stop >= length:
                    ends[piece[stop - length - first : stop - first]] = stop
        self.num_read = max(self.num_read, end)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Where the last tokens ended before, as far as was read; None if they did not."""
        last = tuple(token_ids[-max(MATCHES) :])
        for length, ends in self._ends.items():
            end = ends.get(last[-length:]) if len(last) >= length else None
            if end is not None and end < len(token_ids):
                return end
        return None


def continuation(token_ids: Sequence[int], end: int, limit: int) -> list[int]:
    """The `limit` tokens behind position `end`, as if what follows it were repeated for ever."""
    piece = [*token_ids[end : end + limit]]
    period = len(token_ids) - end
    while len(piece) < limit:
        piece.append(piece[-period])
    return piece


def match_length(token_ids: Sequence[int], end: int) -> int:
    """How many tokens before `end` are those at the end of the sequence, up to `LONGEST_MATCH`."""
    num_tokens = len(token_ids)
    length = 0
    while length < min(LONGEST_MATCH, end) and token_ids[end - 1 - length] == token_ids[num_tokens - 1 - length]:
        length += 1
    return length


class NgramProposer:
    """The `Proposer` over the sequence itself; any number of slots and any length cost it nothing."""

    def __init__(self, *, num_slots: int, max_length: int) -> None:
        self.num_slots, self.max_length, self.num_branches = num_slots, max_length, 0
        self._held: dict[int, tuple[NgramIndex, Sequence[int]]] = {}

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        """Propose up to each draft's limit in one step, as far as its grammar allows; there are no runner-ups."""
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
        end = index.find(token_ids)
        return [] if end is None else continuation(token_ids, end, draft.limit)
