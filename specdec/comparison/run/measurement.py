"""Measurement of each way to serve under each set of conditions, on running servers, with a record of every request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from specdec.comparison.plan.config import ComparisonConfig
from specdec.comparison.plan.datasets import Prompt
from specdec.comparison.plan.grid import WARM_UP, Cell, Sample, Window, walk
from specdec.comparison.plan.record import RequestRecord
from specdec.comparison.run.client import Ask, asking
from specdec.comparison.run.connections import Clients, connected
from specdec.comparison.run.grpc_client import request_of
from specdec.comparison.run.load import as_they_come, by_locust, closed_loop, for_seconds, poisson_arrivals, steady
from specdec.comparison.run.progress import Progress
from specdec.comparison.run.ties import with_margins
from specdec.comparison.run.topologies import Deployment
from specdec.inference.errors import SpecDecError, UnavailableError


async def measure(
    config: ComparisonConfig, servers: Deployment, progress: Progress, before: Sequence[Sample] = ()
) -> list[Sample]:
    """Warm up, then measure every way to serve under all conditions; return the samples of all runs.

    The samples of the warm-up come first. They are used only to check that all answers have the same tokens.

    Args:
        before: samples of servers that ran earlier, with which answers are compared.

    Raises:
        ConfigError: a prompt is too long for one of the servers; nothing was measured.
        SpecDecError: a server cannot be reached, or a server of the comparison answered no request of a run.
    """
    prompts = {prompt_set.kind: prompt_set.prompts for prompt_set in config.workload.prompt_sets}
    servers.set_rtt(0.0)
    async with connected(config, servers.address) as clients:
        measurement = Measurement(config, servers, clients)
        samples = []
        for cell in _warm_up(config):
            progress.phase(f"warming up {cell.contender.label}, {cell.kind}")
            samples.append(await measurement.run(cell, WARM_UP, prompts[cell.kind][: config.workload.warm_up]))
        for repeat, cell in walk(config):
            servers.set_rtt(cell.rtt_ms)
            samples.append(await measurement.run(cell, repeat, prompts[cell.kind]))
            progress.measured(samples[-1])
        return await with_margins(config, clients, samples, before) if config.workload.near_tie else samples


def _warm_up(config: ComparisonConfig) -> list[Cell]:
    """Return the measurements of the warm-up: each way to serve answers a few prompts of each kind, one at a time.

    Then it answers as many requests at once as the measurement will have. These requests fill memory pages, caches and
    thread pools, and let servers build graphs for such passes.
    """
    kinds = [prompt_set.kind for prompt_set in config.workload.prompt_sets]
    loads, most = [(kind, 1) for kind in kinds], config.workload.max_concurrency
    loads += [(kinds[0], most)] if most > 1 else []
    return [Cell(contender, kind, 0.0, load) for contender in config.contenders for kind, load in loads]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A comparison with its running servers and connected clients, ready to measure."""

    config: ComparisonConfig
    servers: Deployment
    clients: Clients

    async def run(self, cell: Cell, repeat: int, prompts: Sequence[Prompt]) -> Sample:
        """Measure a cell (a way to serve under given conditions) once: send its requests, and return their records.

        Args:
            repeat: number of the run, from 0; `WARM_UP` before the measurement.

        Raises:
            UnavailableError: a server of the comparison answered no request.
        """
        began_s, counted_s = time.monotonic(), self._counted_s(cell, repeat)
        window = (began_s + counted_s / 2, began_s + 1.5 * counted_s) if counted_s else None
        return self._sample(cell, repeat, *await self._send(cell, repeat, prompts), window)

    async def steady(self, cell: Cell, prompts: Sequence[Prompt], limit_s: float) -> Sample:
        """Measure a way to serve with always `cell.concurrency` requests in flight, for at most `limit_s` seconds.

        See `steady` in load.py.

        Raises:
            UnavailableError: a server of the comparison answered no request.
        """
        ask = asking(self.clients[cell.contender], prompts)
        return self._sample(cell, 0, *await timed(steady(ask, len(prompts), cell.concurrency, limit_s)))

    def _sample(
        self,
        cell: Cell,
        repeat: int,
        records: Sequence[RequestRecord],
        client_share: float,
        window: Window | None = None,
    ) -> Sample:
        answered = tuple(record for record in records if record.error_code is None)
        failures = tuple(record for record in records if record.error_code is not None)
        if failures and not answered and cell.contender.endpoint is None:
            message = f"no request was answered; the first failed with: {failures[0].error_message}"
            raise UnavailableError(f"{cell}: {message}")
        return Sample(cell, repeat, answered, failures, client_share, window)

    def _counted_s(self, cell: Cell, repeat: int) -> float:
        """Return the seconds of a run that count, as --cell_s sets them; 0 if the run ends after its last request.

        The warm-up and open loops end so, and all other runs without --cell_s.
        """
        return self.config.workload.cell_s if repeat != WARM_UP and cell.request_rate is None else 0.0

    async def _send(self, cell: Cell, repeat: int, prompts: Sequence[Prompt]) -> tuple[list[RequestRecord], float]:
        """Send the requests of a run; return their records, and CPU time over wall time of the process that sends."""
        contender, workload = cell.contender, self.config.workload
        if cell.concurrency > 1 and self.config.uses_locust:
            requests = [request_of(prompt, workload, contender) for prompt in prompts if isinstance(prompt, str)]
            address, deadline_s = self.servers.address(contender), workload.deadline_s
            return await by_locust(address, requests, concurrency=cell.concurrency, deadline_s=deadline_s)
        client = self.clients[contender]
        if contender.endpoint is not None:
            with suppress(SpecDecError):  # connects all streams before the clock runs; requests report failures
                await asyncio.gather(*(client.context() for _ in range(max(1, cell.concurrency))))
        return await timed(self._ask(cell, repeat, asking(client, prompts), len(prompts)))

    async def _ask(self, cell: Cell, repeat: int, ask: Ask, count: int) -> list[RequestRecord]:
        """Send `count` prompts from this process, and return the records of all requests.

        The conditions in `cell` say whether some requests are always in flight or requests come at random times.
        """
        if counted_s := self._counted_s(cell, repeat):
            return await for_seconds(ask, count, cell.concurrency, counted_s)
        if cell.request_rate is None:
            return await closed_loop(ask, count, cell.concurrency)
        # Arrivals differ between runs, but not between contenders.
        workload = self.config.workload
        arrivals_s = poisson_arrivals(cell.request_rate, workload.num_arrivals, (workload.seed, repeat))
        return await as_they_come(ask, count, arrivals_s)


async def timed(records: Awaitable[list[RequestRecord]]) -> tuple[list[RequestRecord], float]:
    """Return the records, and this process's CPU time over wall time while they were made."""
    cpu_s, wall_s = time.process_time(), time.monotonic()
    return await records, (time.process_time() - cpu_s) / (time.monotonic() - wall_s)
