"""Walks the grid over running servers and keeps what every request gave."""

from __future__ import annotations

from collections.abc import Sequence

from inference.comparison.plan.config import ComparisonConfig, WorkloadConfig
from inference.comparison.plan.grid import Cell, Sample, walk
from inference.comparison.run.client import asking
from inference.comparison.run.load import as_they_come, one_by_one, poisson_arrivals, run_at_once
from inference.comparison.run.progress import Progress
from inference.comparison.run.record import RequestRecord
from inference.comparison.run.topologies import Deployment
from inference.errors import UnavailableError

WARM_UP = -1


async def measure(config: ComparisonConfig, servers: Deployment, progress: Progress) -> list[Sample]:
    """Warm up, then run the whole grid; the warm-up's answers come first and count only for the check of tokens.

    Raises:
        SpecDecError: no server answers, or no request of a run was answered.
    """
    prompts = {prompt_set.kind: prompt_set.prompts for prompt_set in config.workload.prompt_sets}
    samples = await _warm_up(config, servers, progress, prompts)
    for repeat, cell in walk(config):
        servers.set_rtt(cell.rtt_ms)
        samples.append(await _run(config, servers, cell, prompts[cell.kind], repeat))
        progress.measured(samples[-1])
    return samples


async def _warm_up(
    config: ComparisonConfig, servers: Deployment, progress: Progress, prompts: dict[str, tuple[str, ...]]
) -> list[Sample]:
    """Every contender answers the first prompts of every kind: pages, caches and thread pools are there afterwards."""
    servers.set_rtt(0.0)
    samples, count = [], config.workload.warm_up
    for contender in config.contenders:
        for kind, texts in prompts.items():
            cell = Cell(contender, kind, 0.0, 1)
            progress.warming_up(cell)
            samples.append(await _run(config, servers, cell, texts[:count], WARM_UP))
    return samples


async def _run(
    config: ComparisonConfig, servers: Deployment, cell: Cell, prompts: Sequence[str], repeat: int
) -> Sample:
    records = await _send(servers.address(cell.contender), config.workload, cell, prompts, repeat)
    answered = tuple(record for record in records if record.error_code is None)
    failures = tuple(record for record in records if record.error_code is not None)
    if not answered:
        raise UnavailableError(f"{cell}: no request was answered; the first failed with: {failures[0].error_message}")
    return Sample(cell, repeat, answered, failures)


async def _send(
    address: str, workload: WorkloadConfig, cell: Cell, prompts: Sequence[str], repeat: int
) -> list[RequestRecord]:
    if cell.concurrency > 1:
        return await run_at_once(address, prompts, workload, cell.contender, concurrency=cell.concurrency)
    async with asking(address, prompts, workload, cell.contender) as ask:
        if cell.request_rate is None:
            return await one_by_one(ask, len(prompts))
        # In every run other arrivals, but the same ones for all that are compared.
        arrivals_s = poisson_arrivals(cell.request_rate, workload.num_arrivals, (workload.seed, repeat))
        return await as_they_come(ask, len(prompts), arrivals_s)
