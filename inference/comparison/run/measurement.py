"""Walks the grid over running servers and keeps what every request gave."""

from __future__ import annotations

from collections.abc import Sequence

from inference.comparison.plan.config import ComparisonConfig
from inference.comparison.plan.grid import Cell, Sample, walk
from inference.comparison.run.client import run_sequentially
from inference.comparison.run.load import run_at_once
from inference.comparison.run.progress import Progress
from inference.comparison.run.record import RequestRecord
from inference.comparison.run.topologies import Deployment

WARM_UP = -1


async def measure(config: ComparisonConfig, servers: Deployment, progress: Progress) -> list[Sample]:
    """Warm up, then run the whole grid; the warm-up's answers come first and count only for the check of tokens.

    Raises:
        SpecDecError: a request failed.
    """
    prompts = {prompt_set.kind: prompt_set.prompts for prompt_set in config.workload.prompt_sets}
    samples = await _warm_up(config, servers, progress, prompts)
    for repeat, cell in walk(config):
        servers.set_rtt(cell.rtt_ms)
        records = await _run(config, servers, cell, prompts[cell.kind])
        samples.append(Sample(cell, repeat, tuple(records)))
        progress.measured(samples[-1])
    return samples


async def _warm_up(
    config: ComparisonConfig, servers: Deployment, progress: Progress, prompts: dict[str, tuple[str, ...]]
) -> list[Sample]:
    """Every contender answers the first prompt of every kind: pages, caches and thread pools are there afterwards."""
    servers.set_rtt(0.0)
    samples = []
    for contender in config.contenders:
        for kind, texts in prompts.items():
            cell = Cell(contender, kind, 0.0, 1)
            progress.warming_up(cell)
            samples.append(Sample(cell, WARM_UP, tuple(await _run(config, servers, cell, texts[:1]))))
    return samples


async def _run(
    config: ComparisonConfig, servers: Deployment, cell: Cell, prompts: Sequence[str]
) -> list[RequestRecord]:
    address = servers.address(cell.contender)
    if cell.concurrency == 1:
        return await run_sequentially(address, prompts, config.workload, cell.contender)
    return await run_at_once(address, prompts, config.workload, cell.contender, concurrency=cell.concurrency)
