"""Measurement of groups of trials, each an ordinary comparison."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from comparison.plan.config import ALONE, ComparisonConfig
from comparison.plan.grid import Sample
from comparison.report.agreement import check_agreement
from comparison.report.summary import CellSummary, Summarizer
from comparison.run.progress import Progress
from comparison.study.advice import Trial
from comparison.study.flags import AS_JSON, StudyConfig
from comparison.study.search import Budget, Speeds
from comparison.study.space import Group


class Laboratory:
    """Results of all groups so far.

    Args:
        progress: shows what is measured.
    """

    def __init__(self, config: StudyConfig, progress: Progress) -> None:
        self.config = config
        self.progress = progress
        self.budget = Budget(config.budget_s, time.monotonic)
        self.trials: list[Trial] = []
        self.differences: list[str] = []
        self.summaries: list[CellSummary] = []

    def take(self, group: Group, samples: Sequence[Sample]) -> Speeds:
        """Take the samples of a group, the target alone's among them; return its speed-ups over the target alone."""
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
