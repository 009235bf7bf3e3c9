"""Run of `compare_architectures.py study`: a search over servers that start once, or a sweep over one at a time."""

from __future__ import annotations

import time

from rich.console import Console

from comparison.report.summary import spread_of
from comparison.run.host_load import LoadMeter, busy_at_start
from comparison.run.measurement import measure
from comparison.run.progress import Progress
from comparison.run.topologies import deployment
from comparison.study.advice import Evidence
from comparison.study.flags import StudyConfig
from comparison.study.journal import FILE, Journal
from comparison.study.laboratory import Laboratory, comparison_of
from comparison.study.report import Study
from comparison.study.search import Speeds, conduct
from comparison.study.space import Group
from comparison.study.sweep import sweep


async def conduct_study(config: StudyConfig, console: Console) -> Study:
    """Start the servers, search, and stop them; or sweep.

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
    """Search with all servers running; return the groups for which there was no time."""
    config, progress = laboratory.config, laboratory.progress
    progress.phase(f"starting servers: {'; '.join(map(str, config.comparison.machines))}")
    async with deployment(config.comparison) as servers:

        async def measured(group: Group) -> Speeds:
            progress.phase(f"{laboratory.budget.left_s:.0f} s left: {group.place}")
            return laboratory.take(group, await measure(comparison_of(config, group), servers, progress))

        skipped = await conduct(config.space, measured, laboratory.budget)
        progress.phase("stopping servers")
    return skipped
