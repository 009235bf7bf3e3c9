"""Matcher: a compiled grammar for the output of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    """A compiled grammar: which tokens may follow the output of one sequence.

    Callers pass the whole output each time: the committed tokens after the prompt, and draft tokens. One thread at a
    time uses a matcher.
    """

    def num_allowed(self, output: Sequence[int], proposal: Sequence[int]) -> int:
        """Return how many of the proposal's first tokens the grammar accepts.

        Masks may allow fewer: they exclude a token that is only the beginning of forced text.

        Raises:
            InternalError: the grammar refuses the output, though each of its tokens was allowed.
        """

    def masks(self, output: Sequence[int], proposal: Sequence[int]) -> list[bytes | None]:
        """Return the allowed tokens of the len(proposal) + 1 rows that verify a proposal.

        Returns:
            Per row, one bit per token id, the lowest bit of the first byte first. None where the proposal before the
            row is refused or has ended the sequence: no token of that row can be committed. There are fewer rows where
            the grammar becomes too complex within the proposal: no token may be committed for the missing ones.

        Raises:
            InternalError: as `num_allowed`.
            InvalidRequestError: the grammar is too complex for the first mask.
        """

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` tokens that must follow; none if there is a choice, or the output is refused."""

    def goes_on(self, output: Sequence[int]) -> bool:
        """Return whether the output is allowed and has not ended."""
