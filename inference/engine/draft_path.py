"""Draft tokens in a row: a chain or a branch, what each token promises, and how much of it the target was told of."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, field

from inference.model.proposer import DraftToken


@dataclass(slots=True, eq=False)
class DraftPath:
    """Draft tokens in a row, made in one slot.

    Attributes:
        start: absolute position of the first token.
        rates: how likely the target agrees with each token, if it agrees with all before it.
        nodes: numbers of those that the target was told of: the first ones.
        exhausted: the proposer has nothing more for this path.
    """

    slot: int
    start: int
    tokens: list[DraftToken] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    exhausted: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def advance(self, start: int) -> None:
        """Drop the tokens before position `start`, which are committed now."""
        count = start - self.start
        self.start = start
        self.tokens, self.rates, self.nodes = self.tokens[count:], self.rates[count:], self.nodes[count:]

    @property
    def num_unsent(self) -> int:
        return len(self.tokens) - len(self.nodes)

    @property
    def survivals(self) -> list[float]:
        """Probability, per token, that the target agrees with it and with all before it."""
        return list(itertools.accumulate(self.rates, operator.mul))

    @property
    def survival(self) -> float:
        return math.prod(self.rates)
