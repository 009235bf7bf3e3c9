"""Search space of a study: conditions that clients set, and ways to serve them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from specdec.comparison.plan.config import LOOKUP, Contender

_WORDS = {
    "kind": "{} prompts",
    "rtt_ms": "round trip {:g} ms",
    "concurrency": "{} in flight",
    "max_new_tokens": "{} output tokens",
    "temperature": "temperature {:g}",
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions under which requests are served, set by clients and network.

    Attributes:
        kind: kind of the prompts.
        rtt_ms: round trip time between edge and target, in milliseconds.
        concurrency: requests in flight.
        max_new_tokens: output tokens of each request.
    """

    kind: str
    rtt_ms: float
    concurrency: int
    max_new_tokens: int
    temperature: float

    def __str__(self) -> str:
        return ", ".join(_WORDS[factor].format(getattr(self, factor)) for factor in FACTORS)

    def factor(self, name: str) -> str:
        """Return the condition `name` as readable text, such as "4 in flight"."""
        return _WORDS[name].format(getattr(self, name))


FACTORS = tuple(field.name for field in fields(Conditions))
"""Names of the conditions of a study, such as "rtt_ms"."""


@dataclass(frozen=True, slots=True)
class Group:
    """Contenders (ways to serve) that are measured together and with the target alone, under the conditions `place`."""

    place: Conditions
    contenders: tuple[Contender, ...]

    def __str__(self) -> str:
        return f"{'; '.join(contender.label for contender in self.contenders)} at {self.place}"


@dataclass(frozen=True, slots=True)
class Space:
    """Contenders (ways to serve) and conditions that a study may combine. The first value of each is the usual one.

    Attributes:
        contenders: at least one contender, without the target alone.
        conditions: values of each of `FACTORS`.
    """

    contenders: tuple[Contender, ...]
    conditions: dict[str, tuple[Any, ...]]

    @property
    def usual(self) -> Conditions:
        """Conditions at which the search begins: the first value of each."""
        return Conditions(**{factor: values[0] for factor, values in self.conditions.items()})

    @property
    def ways(self) -> tuple[Contender, ...]:
        """First contender (way to serve) of each topology and schedule; see `way`."""
        return tuple({way(contender): contender for contender in reversed(self.contenders)}.values())[::-1]

    def changed(self, num_factors: int) -> Iterator[Conditions]:
        """Yield the conditions that differ from the usual ones in `num_factors` values."""
        for factors in itertools.combinations(FACTORS, num_factors):
            for values in itertools.product(*(self.conditions[factor][1:] for factor in factors)):
                yield Conditions(**{**asdict(self.usual), **dict(zip(factors, values, strict=True))})

    @property
    def num_trials(self) -> int:
        """Number of combinations of a contender (a way to serve) with conditions."""
        places = itertools.product(*self.conditions.values())
        return len(self.contenders) * sum(1 for _ in places)


def way(contender: Contender) -> str:
    """Return the name of a contender's topology and schedule; the name also says if the target proposes by itself."""
    return f"{contender.name} with its own {LOOKUP}" if contender.draft == LOOKUP else contender.name
