"""Order of a study's measurements: under the usual conditions, then with one condition changed, then with two.

The search itself measures nothing: it yields groups of ways to serve, each group to be measured under one set of
conditions, and is sent their speed-ups.

A search of this size (three or four topologies, a few drafts and lengths, tens of conditions) ends within a few dozen
groups. The most valuable groups come first, since the time may end after any of them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from specdec.comparison.plan.config import Contender
from specdec.comparison.study.space import Conditions, Group, Space, way

Speeds: TypeAlias = Mapping[Contender, float]
"""Speed-ups over the target alone, by way to serve; empty if there was no time to measure any."""
Search: TypeAlias = Generator[Group, Speeds, None]
"""Generator that yields groups of ways to serve, to measure under the same conditions, and is sent their speed-ups."""
Measure: TypeAlias = Callable[[Group], Awaitable[Speeds]]
"""Asynchronous function that measures a group of ways to serve, and returns their speed-ups over the target alone."""

CHOICES = ("draft", "gamma", "branches")
"""Fields of a contender (a way to serve) that may vary within a topology and schedule."""


def search(space: Space) -> Search:
    """Yield groups of ways to serve to measure: under the usual conditions, then with one or two of them changed.

    Under the usual conditions the search tries topologies, then drafts, gammas and numbers of branches. Under changed
    conditions it yields the best way of each topology and schedule (with two changed, only the best two of these), and
    then the winner with neighbouring gammas.
    """
    known: dict[Conditions, dict[Contender, float]] = defaultdict(dict)

    def ask(place: Conditions, contenders: Iterable[Contender]) -> Search:
        new = tuple(contender for contender in dict.fromkeys(contenders) if contender not in known[place])
        if new:
            known[place].update((yield Group(place, new)))

    def leaders(place: Conditions) -> list[Contender]:
        """Return the best way to serve of each topology and schedule under the conditions `place`, best first."""
        by_way: dict[str, Contender] = {}
        for contender in sorted(known[place], key=lambda it: -known[place][it]):
            by_way.setdefault(way(contender), contender)
        return list(by_way.values())

    usual = space.usual
    yield from ask(usual, space.ways)
    for choice in CHOICES:
        yield from ask(usual, [it for best in leaders(usual)[:1] for it in _varied(space, best, choice)])
    # A way may have lost only for its draft or gamma: all get the best one's, then gammas beside those of the best two.
    yield from ask(usual, [it for best in leaders(usual)[:1] for it in _alike(space, best)])
    yield from ask(usual, [it for best in leaders(usual)[:2] for it in _neighbours(space, best)])
    chosen = leaders(usual)
    for num_factors, num_leaders in ((1, len(chosen)), (2, 2)):
        for place in space.changed(num_factors):
            yield from ask(place, chosen[:num_leaders])
            yield from ask(place, [it for best in leaders(place)[:1] for it in _neighbours(space, best)])


def _varied(space: Space, best: Contender, choice: str) -> Iterator[Contender]:
    """Yield the ways to serve that equal `best` in all but the field named by `choice`, and `best` itself."""
    for contender in space.contenders:
        if replace(contender, **{choice: getattr(best, choice)}) == best:
            yield contender


def _alike(space: Space, best: Contender) -> Iterator[Contender]:
    """Yield the ways to serve with the draft, gamma and branches of `best`; None, on either side, equals any value."""
    for contender in space.contenders:
        both = [(getattr(contender, choice), getattr(best, choice)) for choice in CHOICES]
        if all(mine == its or None in (mine, its) for mine, its in both):
            yield contender


def _neighbours(space: Space, best: Contender) -> Iterator[Contender]:
    """Yield the way to serve `best` with the next smaller gamma, with its own, and with the next larger one."""
    varied = sorted(_varied(space, best, "gamma"), key=lambda it: it.gamma or 0)
    if best in varied:
        at = varied.index(best)
        yield from varied[max(0, at - 1) : at + 2]


class Budget:
    """Time limit of a study, with an estimate of how long a group of measurements takes from the slowest one so far.

    Args:
        seconds: wall time of the study, from now on.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._pace_s = 0.0

    @property
    def left_s(self) -> float:
        return self._end - self._clock()

    @property
    def limit_s(self) -> float | None:
        """Seconds after which a running group of measurements is given up; None (no limit) for the first group.

        Without the results of the first group there would be no advice.
        """
        return self.left_s if self._pace_s else None

    def allows(self, group: Group) -> bool:
        return self._pace_s * _size(group) <= self.left_s

    def took(self, group: Group, seconds: float) -> None:
        """Update the estimate with the time that a group of measurements took."""
        self._pace_s = max(self._pace_s, seconds / _size(group))


def _size(group: Group) -> int:
    """Return a number proportional to the tokens that a group's ways to serve and the target alone generate."""
    return (len(group.contenders) + 1) * group.place.max_new_tokens


async def conduct(space: Space, measure: Measure, budget: Budget) -> list[Group]:
    """Search within the budget; return the groups of ways to serve for which there was no time, or not enough."""
    steps, skipped = search(space), []
    group = next(steps, None)
    while group is not None:
        speeds = await _in_time(group, measure, budget)
        if speeds is None:
            skipped.append(group)
        try:
            group = steps.send(speeds or {})
        except StopIteration:
            group = None
    return skipped


async def _in_time(group: Group, measure: Measure, budget: Budget) -> Speeds | None:
    """Return the speed-ups of a group of ways to serve; None if the time is too short to start or to finish it."""
    if not budget.allows(group):
        return None
    before_s = budget.left_s
    try:
        async with asyncio.timeout(budget.limit_s) as limit:
            speeds = await measure(group)
    except TimeoutError:
        if not limit.expired():
            raise
        return None
    budget.took(group, before_s - budget.left_s)
    return speeds
