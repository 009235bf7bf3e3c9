"""What a study may try: conditions that clients bring, and ways to serve them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from comparison.plan.config import LOOKUP, Contender

_WORDS = {
    "kind": "{} prompts",
    "rtt_ms": "round trip {:g} ms",
    "concurrency": "{} in flight",
    "max_new_tokens": "{} output tokens",
    "temperature": "temperature {:g}",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Conditions that a way to serve meets, and does not choose."""

    kind: str
    rtt_ms: float
    concurrency: int
    max_new_tokens: int
    temperature: float

    def __str__(self) -> str:
        return ", ".join(_WORDS[factor].format(getattr(self, factor)) for factor in FACTORS)

    def factor(self, name: str) -> str:
        """One condition, for people."""
        return _WORDS[name].format(getattr(self, name))


FACTORS = tuple(field.name for field in fields(Place))


@dataclass(frozen=True, slots=True)
class Group:
    """Contenders that are measured at one place together, beside the target alone."""

    place: Place
    contenders: tuple[Contender, ...]

    def __str__(self) -> str:
        return f"{'; '.join(contender.label for contender in self.contenders)} at {self.place}"


@dataclass(frozen=True, slots=True)
class Space:
    """All that may be combined; of everything, the first value is the usual one.

    Attributes:
        contenders: ways to serve, but for the target alone; at least one.
        conditions: values of each of `FACTORS`.
    """

    contenders: tuple[Contender, ...]
    conditions: dict[str, tuple[Any, ...]]

    @property
    def usual(self) -> Place:
        """Where the search for a way to serve begins."""
        return Place(**{factor: values[0] for factor, values in self.conditions.items()})

    @property
    def ways(self) -> tuple[Contender, ...]:
        """The usual contender of every topology and schedule."""
        return tuple({way(contender): contender for contender in reversed(self.contenders)}.values())[::-1]

    def changed(self, num_factors: int) -> Iterator[Place]:
        """Places that differ from the usual one in so many conditions."""
        for factors in itertools.combinations(FACTORS, num_factors):
            for values in itertools.product(*(self.conditions[factor][1:] for factor in factors)):
                yield Place(**{**asdict(self.usual), **dict(zip(factors, values, strict=True))})

    @property
    def num_trials(self) -> int:
        """Of the whole grid."""
        places = itertools.product(*self.conditions.values())
        return len(self.contenders) * sum(1 for _ in places)


def way(contender: Contender) -> str:
    """Who computes where, whatever it drafts with."""
    return f"{contender.name} with its own {LOOKUP}" if contender.draft == LOOKUP else contender.name
