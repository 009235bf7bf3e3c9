"""What to try next: one factor at a time from the usual, then pairs around the best. Pure: it yields what it wants
measured, and is sent what came out.

A search of this size (three or four topologies, a few drafts and lengths, tens of conditions) is over in a few dozen
groups; what matters is that the first ones are worth most, for the time may end with any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from comparison.plan.config import Contender
from comparison.study.space import Group, Place, Space, way

Speeds: TypeAlias = Mapping[Contender, float]
"""Speed-ups over the target alone, by contender; nothing of what there was no time for."""
Search: TypeAlias = Generator[Group, Speeds, None]

CHOICES = ("draft", "gamma", "branches")


def search(space: Space) -> Search:
    """First the best way to serve at the usual place, then the leaders of all ways elsewhere, then pairs of changes."""
    known: dict[Place, dict[Contender, float]] = defaultdict(dict)

    def ask(place: Place, contenders: Iterable[Contender]) -> Search:
        new = tuple(contender for contender in dict.fromkeys(contenders) if contender not in known[place])
        if new:
            known[place].update((yield Group(place, new)))

    def leaders(place: Place) -> list[Contender]:
        """The best of each way there, best first."""
        by_way: dict[str, Contender] = {}
        for contender in sorted(known[place], key=lambda it: -known[place][it]):
            by_way.setdefault(way(contender), contender)
        return list(by_way.values())

    usual = space.usual
    yield from ask(usual, space.ways)
    for choice in CHOICES:
        yield from ask(usual, [it for best in leaders(usual)[:1] for it in _varied(space, best, choice)])
    # A way may have lost for its draft or length alone: all get what served the best one best, then pairs around it.
    yield from ask(usual, [it for best in leaders(usual)[:1] for it in _alike(space, best)])
    yield from ask(usual, [it for best in leaders(usual)[:2] for it in _neighbours(space, best)])
    chosen = leaders(usual)
    for num_factors, num_leaders in ((1, len(chosen)), (2, 2)):
        for place in space.changed(num_factors):
            yield from ask(place, chosen[:num_leaders])
            yield from ask(place, [it for best in leaders(place)[:1] for it in _neighbours(space, best)])


def _varied(space: Space, best: Contender, choice: str) -> Iterator[Contender]:
    """All that differ from the best in this choice alone."""
    for contender in space.contenders:
        if replace(contender, **{choice: getattr(best, choice)}) == best:
            yield contender


def _alike(space: Space, best: Contender) -> Iterator[Contender]:
    """The other ways, with the draft and length of the best one."""
    for contender in space.contenders:
        both = [(getattr(contender, choice), getattr(best, choice)) for choice in CHOICES]
        if all(mine == its or None in (mine, its) for mine, its in both):
            yield contender


def _neighbours(space: Space, best: Contender) -> Iterator[Contender]:
    """Its next shorter and next longer proposals."""
    varied = sorted(_varied(space, best, "gamma"), key=lambda it: it.gamma or 0)
    if best in varied:
        at = varied.index(best)
        yield from varied[max(0, at - 1) : at + 2]


class Budget:
    """Lets groups run that are expected to end in time, by how long others took for a token of a contender.

    Args:
        seconds: for all.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._pace_s = 0.0

    @property
    def left_s(self) -> float:
        return self._end - self._clock()

    def allows(self, group: Group) -> bool:
        return self._pace_s * _size(group) <= self.left_s

    def took(self, group: Group, seconds: float) -> None:
        """Learn of a group that was measured; the slowest so far counts."""
        self._pace_s = max(self._pace_s, seconds / _size(group))


def _size(group: Group) -> int:
    """Tokens that contenders and the target alone are asked for, in proportion."""
    return (len(group.contenders) + 1) * group.place.max_new_tokens


async def conduct(space: Space, measure: Callable[[Group], Awaitable[Speeds]], budget: Budget) -> list[Group]:
    """Search as long as there is time; return the groups that there was none for."""
    steps, skipped = search(space), []
    group = next(steps, None)
    while group is not None:
        speeds: Speeds = {}
        if budget.allows(group):
            before_s = budget.left_s
            speeds = await measure(group)
            budget.took(group, before_s - budget.left_s)
        else:
            skipped.append(group)
        try:
            group = steps.send(speeds)
        except StopIteration:
            group = None
    return skipped
