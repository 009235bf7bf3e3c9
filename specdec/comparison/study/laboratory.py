"""Run of a study: a search over servers that all start once, or a sweep that starts one contender's at a time.

A contender is a way to serve, a trial its measurement under one set of conditions. Each group of trials is measured as
a comparison. A sweep is for graphs that are compiled for one gamma (number of draft tokens): a search would start and
stop the same servers again and again. The sweep starts each contender once, and measures it under the usual conditions
and with each of them changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from rich.console import Console

from specdec.comparison.plan.config import ALONE, ComparisonConfig, Contender
from specdec.comparison.plan.grid import Sample
from specdec.comparison.report.agreement import check_agreement
from specdec.comparison.report.summary import CellSummary, Summarizer, spread_of
from specdec.comparison.run.measurement import measure
from specdec.comparison.run.progress import Progress
from specdec.comparison.run.topologies import deployment
from specdec.comparison.study.advice import Evidence, Trial
from specdec.comparison.study.flags import AS_JSON, StudyConfig
from specdec.comparison.study.journal import FILE, Journal
from specdec.comparison.study.report import Study
from specdec.comparison.study.search import Budget, Speeds, conduct
from specdec.comparison.study.space import Conditions, Group
from specdec.inference.observe.host_load import LoadMeter, busy_at_start

Samples: TypeAlias = dict[Conditions, list[Sample]]
"""Samples of one way to serve, by the conditions under which they were measured."""


async def conduct_study(config: StudyConfig, console: Console) -> Study:
    """Run a study, and return its results: a search over servers that all run, or a sweep with one server at a time.

    Raises:
        SpecDecError: a server or a request failed.
    """
    comparison, started = config.comparison, time.monotonic()
    if busy := await busy_at_start(comparison.usable_cores):
        end = "" if config.anyway else " A study of a busy machine ends without advice: stop it, or give --anyway."
        console.print(f"warning: {busy}{end}")
    meter = LoadMeter(comparison.usable_cores, is_whole=True)
    with Progress(console, None) as progress:
        laboratory = Laboratory(config, progress)
        if comparison.one_at_a_time:
            skipped = await sweep(laboratory, Journal(comparison.output / FILE, comparison.asked))
        else:
            skipped = await _searched(laboratory)
    evidence = Evidence(config.space, laboratory.trials, skipped)
    found = evidence, tuple(laboratory.differences), config.prices, time.monotonic() - started
    return Study(comparison, *found, meter.read(), spread_of(laboratory.summaries), config.anyway)


async def _searched(laboratory: Laboratory) -> list[Group]:
    """Start all servers, run the search, and stop them; return the groups for which the time was too short.

    A group is a set of ways to serve, to be measured under the same conditions.
    """
    config, progress = laboratory.config, laboratory.progress
    progress.phase(f"starting servers: {'; '.join(map(str, config.comparison.machines))}")
    async with deployment(config.comparison, progress.note) as servers:

        async def measured(group: Group) -> Speeds:
            progress.phase(f"{laboratory.budget.left_s:.0f} s left: {group.place}")
            return laboratory.take(group, await measure(comparison_of(config, group), servers, progress))

        skipped = await conduct(config.space, measured, laboratory.budget)
        progress.phase("stopping servers")
    return skipped


class Laboratory:
    """State of a study: its configuration, its budget of time, and the results of all measurements so far.

    Args:
        progress: display of the measurement that runs.
    """

    def __init__(self, config: StudyConfig, progress: Progress) -> None:
        self.config = config
        self.progress = progress
        self.budget = Budget(config.budget_s, time.monotonic)
        self.trials: list[Trial] = []
        self.differences: list[str] = []
        self.summaries: list[CellSummary] = []

    def take(self, group: Group, samples: Sequence[Sample]) -> Speeds:
        """Add the samples of a group of ways to serve that were measured together; return their speed-ups.

        The samples include those of the target alone, with which the others are compared.
        """
        config = comparison_of(self.config, group)
        self.differences += map(str, check_agreement(samples, near_tie=config.workload.near_tie).differences)
        summaries = list(Summarizer(config, samples).summaries())
        self.summaries += summaries
        by_contender = {summary.cell.contender: summary for summary in summaries}
        alone = by_contender.pop(ALONE)
        trials = [_trial(group, summary, alone) for summary in by_contender.values()]
        self.trials += trials
        return {trial.contender: trial.speedup.median for trial in trials}


def comparison_of(config: StudyConfig, group: Group) -> ComparisonConfig:
    """Return the configuration of the comparison that measures a group of ways to serve under the same conditions."""
    place, comparison, kind = group.place, config.comparison, group.place.kind.removesuffix(AS_JSON)
    workload = replace(
        comparison.workload,
        prompt_sets=tuple(prompt_set for prompt_set in comparison.workload.prompt_sets if prompt_set.kind == kind),
        concurrencies=(place.concurrency,),
        max_new_tokens=place.max_new_tokens,
        temperature=place.temperature,
        grammar=None if kind == place.kind else config.schema,
    )
    network = replace(comparison.network, rtts_ms=(place.rtt_ms,))
    return replace(comparison, workload=workload, network=network, chosen=(ALONE, *group.contenders))


def _trial(group: Group, summary: CellSummary, alone: CellSummary) -> Trial:
    if summary.speedup is None:
        raise ValueError("the target alone was not measured")
    rates = summary.tokens_per_s.median, alone.tokens_per_s.median
    contender = summary.cell.contender
    return Trial(group.place, contender, summary.speedup, *rates, summary.ttft_s, alone.ttft_s, summary.acceptance_rate)


async def sweep(laboratory: Laboratory, journal: Journal) -> list[Group]:
    """Measure all ways to serve, one after another, except for what the journal has; return what the time left out.

    Each group in the result is one way to serve and one set of conditions.
    """
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
    """Return a function that adds a contender's samples to the results and the journal of a study.

    Args:
        contender: way to serve.
        alone: samples of the target alone by conditions, with which the contender's are compared.
    """

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
    """Start the servers of a contender, measure it under each of the conditions in `places`, and stop them.

    Args:
        before: samples of the target alone, with which answers are compared.
        take: function that is called with each of `places` and the samples measured under it.
    """
    config, progress = laboratory.config, laboratory.progress
    (part,) = replace(config.comparison, chosen=(contender,)).parts
    progress.phase(f"{laboratory.budget.left_s:.0f} s left: starting {contender.label}")
    async with deployment(part, progress.note) as servers:
        for place in places:
            progress.phase(f"{contender.label} at {place}")
            here = comparison_of(config, Group(place, (contender,)))
            here = replace(here, chosen=part.chosen, gammas=part.gammas, one_at_a_time=False)
            take(place, await measure(here, servers, progress, before.get(place, ())))
