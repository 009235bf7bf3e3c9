"""Walks the grid over running servers and keeps what every request gave."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from inference.comparison.plan.config import ComparisonConfig
from inference.comparison.plan.datasets import Prompt
from inference.comparison.plan.grid import Cell, Sample, walk
from inference.comparison.run.client import asking
from inference.comparison.run.connections import Clients, connected
from inference.comparison.run.limits import check_lengths
from inference.comparison.run.load import as_they_come, one_by_one, poisson_arrivals, run_at_once, several_at_once
from inference.comparison.run.progress import Progress
from inference.comparison.run.record import RequestRecord
from inference.comparison.run.topologies import Deployment
from inference.errors import SpecDecError, UnavailableError

WARM_UP = -1


async def measure(config: ComparisonConfig, servers: Deployment, progress: Progress) -> list[Sample]:
    """Warm up, then run the whole grid; the warm-up's answers come first and count only for the check of tokens.

    Raises:
        ConfigError: a prompt is too long for one of the servers; nothing was measured.
        SpecDecError: a server cannot be reached, or one that the comparison has started answered no request of a run.
    """
    prompts = {prompt_set.kind: prompt_set.prompts for prompt_set in config.workload.prompt_sets}
    servers.set_rtt(0.0)
    async with connected(config, servers.address) as clients:
        await check_lengths(config, clients)
        samples = await _warm_up(config, servers, clients, progress)
        for repeat, cell in walk(config):
            servers.set_rtt(cell.rtt_ms)
            samples.append(await _run(config, servers, clients, Turn(cell, repeat, prompts[cell.kind])))
            progress.measured(samples[-1])
    return samples


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a cell that is due."""

    cell: Cell
    repeat: int
    prompts: Sequence[Prompt]


async def _warm_up(config: ComparisonConfig, servers: Deployment, clients: Clients, progress: Progress) -> list[Sample]:
    """Every contender answers the first prompts of every kind, and as many requests at once as ever will be: pages,
    caches, thread pools and the graphs of such passes are there afterwards."""
    samples, count = [], config.workload.warm_up
    kinds = [(prompt_set, 1) for prompt_set in config.workload.prompt_sets]
    most = max(config.workload.concurrencies)
    for contender in config.contenders:
        for prompt_set, concurrency in [*kinds, *([(kinds[0][0], most)] if most > 1 else [])]:
            turn = Turn(Cell(contender, prompt_set.kind, 0.0, concurrency), WARM_UP, prompt_set.prompts[:count])
            progress.warming_up(turn.cell)
            samples.append(await _run(config, servers, clients, turn))
    return samples


async def _run(config: ComparisonConfig, servers: Deployment, clients: Clients, turn: Turn) -> Sample:
    records = await _send(config, servers, clients, turn)
    answered = tuple(record for record in records if record.error_code is None)
    failures = tuple(record for record in records if record.error_code is not None)
    if not answered and turn.cell.contender.endpoint is None:
        message = f"no request was answered; the first failed with: {failures[0].error_message}"
        raise UnavailableError(f"{turn.cell}: {message}")
    return Sample(turn.cell, turn.repeat, answered, failures)


async def _send(config: ComparisonConfig, servers: Deployment, clients: Clients, turn: Turn) -> list[RequestRecord]:
    cell, prompts, workload = turn.cell, turn.prompts, config.workload
    if cell.concurrency > 1 and config.uses_locust:
        address, texts = servers.address(cell.contender), [prompt for prompt in prompts if isinstance(prompt, str)]
        return await run_at_once(address, texts, workload, cell.contender, concurrency=cell.concurrency)
    client = clients[cell.contender]
    if cell.contender.endpoint is not None:
        with suppress(SpecDecError):  # what has idled is connected again before the clock runs; what is gone, will fail
            await client.model()
    ask = asking(client, prompts)
    if cell.request_rate is not None:
        # In every run other arrivals, but the same ones for all that are compared.
        arrivals_s = poisson_arrivals(cell.request_rate, workload.num_arrivals, (workload.seed, turn.repeat))
        return await as_they_come(ask, len(prompts), arrivals_s)
    if cell.concurrency > 1:
        return await several_at_once(ask, len(prompts), cell.concurrency)
    return await one_by_one(ask, len(prompts))
