"""Walks the grid over running servers and keeps what every request gave."""

from __future__ import annotations

from collections.abc import Sequence

from inference.comparison.plan.config import ComparisonConfig
from inference.comparison.plan.datasets import Prompt
from inference.comparison.plan.grid import Cell, Sample, walk
from inference.comparison.run.client import Clients, connected, run_clients
from inference.comparison.run.limits import check_lengths
from inference.comparison.run.load import run_at_once
from inference.comparison.run.progress import Progress
from inference.comparison.run.record import RequestRecord
from inference.comparison.run.topologies import Deployment

WARM_UP = -1


async def measure(config: ComparisonConfig, servers: Deployment, progress: Progress) -> list[Sample]:
    """Warm up, then run the whole grid; the warm-up's answers come first and count only for the check of tokens.

    Raises:
        ConfigError: a prompt is too long for one of the servers; nothing was measured.
        SpecDecError: a request to a server failed that the comparison has started.
    """
    prompts = {prompt_set.kind: prompt_set.prompts for prompt_set in config.workload.prompt_sets}
    servers.set_rtt(0.0)
    async with connected(config, servers.address) as clients:
        await check_lengths(config, clients)
        samples = await _warm_up(config, servers, clients, progress)
        for repeat, cell in walk(config):
            servers.set_rtt(cell.rtt_ms)
            records = await _run(config, servers, clients, cell, prompts[cell.kind])
            samples.append(Sample(cell, repeat, tuple(records)))
            progress.measured(samples[-1])
    return samples


async def _warm_up(config: ComparisonConfig, servers: Deployment, clients: Clients, progress: Progress) -> list[Sample]:
    """Every contender answers the first prompt of every kind: pages, caches and thread pools are there afterwards."""
    samples = []
    for contender in config.contenders:
        for prompt_set in config.workload.prompt_sets:
            cell = Cell(contender, prompt_set.kind, 0.0, 1)
            progress.warming_up(cell)
            records = await _run(config, servers, clients, cell, prompt_set.prompts[:1])
            samples.append(Sample(cell, WARM_UP, tuple(records)))
    return samples


async def _run(
    config: ComparisonConfig, servers: Deployment, clients: Clients, cell: Cell, prompts: Sequence[Prompt]
) -> list[RequestRecord]:
    if cell.concurrency > 1 and config.uses_locust:
        address, texts = servers.address(cell.contender), [prompt for prompt in prompts if isinstance(prompt, str)]
        return await run_at_once(address, texts, config.workload, cell.contender, concurrency=cell.concurrency)
    client = clients[cell.contender]
    if cell.contender.endpoint is not None:
        await client.model()  # whatever has idled is connected again before the clock runs
    return await run_clients(client, prompts, concurrency=cell.concurrency)
