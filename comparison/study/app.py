"""Run of `compare_architectures.py study`: a search over servers that start once, until the time is over."""

from __future__ import annotations

import time
from dataclasses import replace

from rich.console import Console

from comparison.plan.config import ALONE, ComparisonConfig
from comparison.report.agreement import check_agreement
from comparison.report.summary import CellSummary, Summarizer, spread_of
from comparison.run.host_load import LoadMeter
from comparison.run.measurement import measure
from comparison.run.progress import Progress
from comparison.run.topologies import Deployment, deployment
from comparison.study.advice import Evidence, Trial
from comparison.study.flags import AS_JSON, StudyConfig
from comparison.study.report import Study
from comparison.study.search import Budget, Speeds, conduct
from comparison.study.space import Group


async def conduct_study(config: StudyConfig, console: Console) -> Study:
    """Start the servers, search, and stop them.

    Raises:
        SpecDecError: a server or a request failed.
    """
    started, meter = time.monotonic(), LoadMeter(config.comparison.usable_cores, is_whole=True)
    with Progress(console, None) as progress:
        progress.phase(f"starting servers: {'; '.join(map(str, config.comparison.machines))}")
        async with deployment(config.comparison) as servers:
            laboratory = Laboratory(config, servers, progress)
            skipped = await conduct(config.space, laboratory.measure, laboratory.budget)
            progress.phase("stopping servers")
    evidence = Evidence(config.space, laboratory.trials, skipped)
    found = evidence, tuple(laboratory.differences), config.prices, time.monotonic() - started
    spread = spread_of(laboratory.summaries)
    return Study(config.comparison, *found, meter.read(), spread, config.anyway)


class Laboratory:
    """Measurement of groups, each an ordinary comparison with the target alone, with all results so far."""

    def __init__(self, config: StudyConfig, servers: Deployment, progress: Progress) -> None:
        self._config = config
        self._servers = servers
        self._progress = progress
        self.budget = Budget(config.budget_s, time.monotonic)
        self.trials: list[Trial] = []
        self.differences: list[str] = []
        self.summaries: list[CellSummary] = []

    async def measure(self, group: Group) -> Speeds:
        """Measure a group; return its speed-ups over the target alone."""
        self._progress.phase(f"{self.budget.left_s:.0f} s left: {group.place}")
        config = comparison_of(self._config, group)
        samples = await measure(config, self._servers, self._progress)
        self.differences += map(str, check_agreement(samples, near_tie=config.workload.near_tie).differences)
        summaries = list(Summarizer(config, samples).summaries())
        self.summaries += summaries
        by_contender = {summary.cell.contender: summary for summary in summaries}
        alone = by_contender.pop(ALONE)
        trials = [_trial(group, summary, alone) for summary in by_contender.values()]
        self.trials += trials
        return {trial.contender: trial.speedup.median for trial in trials}


def comparison_of(config: StudyConfig, group: Group) -> ComparisonConfig:
    """Return the comparison that measures a group."""
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
