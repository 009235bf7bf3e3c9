"""Sweep over contenders whose servers run one at a time, such as graphs that are compiled for one gamma.

A search would start and stop the same servers at every place. Here each contender is started once, and measured at the
usual place and with each condition changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from comparison.plan.config import ALONE, Contender
from comparison.plan.grid import Sample
from comparison.run.measurement import measure
from comparison.run.topologies import deployment
from comparison.study.journal import Journal
from comparison.study.laboratory import Laboratory, comparison_of
from comparison.study.space import Conditions, Group

Samples: TypeAlias = dict[Conditions, list[Sample]]


async def sweep(laboratory: Laboratory, journal: Journal) -> list[Group]:
    """Measure all contenders but for trials in the journal; return what the budget did not allow."""
    space, budget, skipped = laboratory.config.space, laboratory.budget, []
    places, alone = (space.usual, *space.changed(1)), Samples()
    laboratory.trials += journal.trials.values()
    laboratory.differences += journal.differences
    for contender in space.contenders:
        groups = [Group(place, (contender,)) for place in places if (place, contender) not in journal.trials]
        if not groups or not budget.allows(Group(space.usual, (contender,))):
            skipped += groups
            continue
        if not alone:
            await _serve(laboratory, ALONE, places, {}, alone.__setitem__)
        before_s = budget.left_s
        await _serve(
            laboratory, contender, [it.place for it in groups], alone, _taking(laboratory, journal, contender, alone)
        )
        budget.took(Group(space.usual, (contender,)), before_s - budget.left_s)
    if not skipped:
        journal.close()
    return skipped


def _taking(
    laboratory: Laboratory, journal: Journal, contender: Contender, alone: Samples
) -> Callable[[Conditions, list[Sample]], None]:
    """Return a function that takes the samples of a contender at a place, and writes the trial."""

    def take(place: Conditions, samples: list[Sample]) -> None:
        num_known = len(laboratory.differences)
        laboratory.take(Group(place, (contender,)), [*alone[place], *samples])
        journal.add(laboratory.trials[-1], laboratory.differences[num_known:])

    return take


async def _serve(
    laboratory: Laboratory,
    contender: Contender,
    places: Sequence[Conditions],
    before: Mapping[Conditions, Sequence[Sample]],
    take: Callable[[Conditions, list[Sample]], None],
) -> None:
    """Start the servers of a contender, measure it at all places, and stop them.

    Args:
        before: samples of the target alone, with which answers are compared.
        take: function that is called with the samples of each place.
    """
    config, progress = laboratory.config, laboratory.progress
    (part,) = replace(config.comparison, chosen=(contender,)).parts
    progress.phase(f"{laboratory.budget.left_s:.0f} s left: starting {contender.label}")
    async with deployment(part) as servers:
        for place in places:
            progress.phase(f"{contender.label} at {place}")
            here = comparison_of(config, Group(place, (contender,)))
            here = replace(here, chosen=part.chosen, gammas=part.gammas, one_at_a_time=False)
            take(place, await measure(here, servers, progress, before.get(place, ())))
