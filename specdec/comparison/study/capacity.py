"""Capacity of one target: the most streams that it serves at a promised rate, alone and with each way to draft.

A stream sends its next request as soon as the last one is answered. A number of streams holds (is not too many) if nine
in ten answers keep the limits of --slo (DistServe, arXiv 2401.09670, counts goodput so), and 99 in 100 the limit for
the first token.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from specdec.comparison.plan.config import ComparisonConfig, Contender
from specdec.comparison.plan.grid import Cell, Sample
from specdec.comparison.report.agreement import check_agreement
from specdec.comparison.report.service import describe, values_of
from specdec.comparison.run.connections import connected
from specdec.comparison.run.measurement import Measurement
from specdec.comparison.run.progress import Progress
from specdec.comparison.run.topologies import deployment
from specdec.comparison.study.search import Budget
from specdec.inference.observe.host_load import HostLoad, LoadMeter

FIRST = 8
"""Streams (requests always in flight) in the first measurement of the way to serve for which the search begins."""
RESOLUTION = 16
"""Inverse precision of the search for the most streams, which ends when their number is known to 1/16."""
PATIENCE = 1.5
"""Time after which a measurement ends without its late answers, as a multiple of the time that --slo allows for all."""
TRIES = 2
"""Number of failed measurements after which a number of streams counts as too many: other work may disturb one."""


def search(limit: int, first: int) -> Generator[int, bool, int]:
    """Yield numbers of streams (requests always in flight) to measure; return the largest within the limits, or 0.

    After each number the caller sends whether the limits of --slo were kept with so many streams. Steps double until
    one number is known with which they are kept, and one with which they are not; then the search goes on by bisection.

    Args:
        limit: most streams to try.
        first: expected number of streams; the first step from it is a quarter of it.
    """
    low, high, streams = 0, limit + 1, min(max(1, first), limit)
    step = max(1, streams // 4)
    while high - low > max(1, low // RESOLUTION):
        if (yield streams):
            low = streams
        else:
            high = streams
        if low and high <= limit:
            streams = (low + high) // 2
        else:
            streams = min(low + step, limit) if low else max(1, high - step)
            step *= 2
    return low


@dataclass(frozen=True, slots=True)
class Probe:
    """Measurement with one number of streams (requests always in flight); times are in seconds, 0 without answers.

    Attributes:
        streams: the number of streams.
        itl_s: time between tokens that nine in ten answers do not exceed; its inverse is the rate of a slow stream.
        ttft_s: time to the first token that 99 in 100 answers do not exceed.
        pass_s: median time of a target pass.
        draft_share: mean time of drafting over the time of the pass; above 0 where both share a device.
        num_drafted: mean number of draft tokens that a pass verifies for one request.
        tokens_per_pass: mean number of tokens that a pass makes final for one request.
        client_share: CPU time over wall time of the process that sent the requests.
        holds: whether the limits of --slo were kept.
    """

    streams: int
    itl_s: float
    ttft_s: float
    pass_s: float
    draft_share: float
    num_drafted: float
    tokens_per_pass: float
    client_share: float
    holds: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """Most streams that a contender (a way to serve) serves within the limits of --slo, at one round trip time.

    Attributes:
        streams: the number of streams; 0 if the limits were not kept even with one.
        probes: all measurements, in the order of the search.
        is_limit: whether more streams may be possible: the time was over, or the largest allowed number was reached.
    """

    contender: Contender
    rtt_ms: float
    streams: int
    probes: tuple[Probe, ...]
    is_limit: bool

    @property
    def best(self) -> Probe | None:
        """Last measurement of `streams` streams in which the limits were kept; None if they never were."""
        return next((it for it in reversed(self.probes) if it.holds and it.streams == self.streams), None)


@dataclass(frozen=True, slots=True)
class Capacities:
    """Results of a search for the most streams that each way to serve can serve within the limits of --slo.

    Attributes:
        found: results, the target alone first; ways to serve that were not reached in time are left out.
        differences: sentences on answers that differ from the target's; there should be none.
        load: load of this host during the search.
        duration_s: seconds of the whole search.
    """

    config: ComparisonConfig
    found: tuple[Capacity, ...]
    differences: tuple[str, ...]
    load: HostLoad
    duration_s: float


async def conduct_capacity(config: ComparisonConfig, console: Console) -> Capacities:
    """Start the servers, search for the most streams that each way to serve can serve, and stop the servers.

    Raises:
        SpecDecError: a server failed, or all requests of a measurement.
    """
    started, meter = time.monotonic(), LoadMeter(config.usable_cores, is_whole=True)
    searcher = Searcher(config, Progress(console, None))
    with searcher.progress as progress:
        for part in config.parts:
            progress.phase(f"starting servers: {'; '.join(map(str, part.machines))}")
            async with deployment(part, progress.note) as servers, connected(part, servers.address) as clients:
                measurement = Measurement(part, servers, clients)
                for contender in part.contenders:
                    await searcher.take(measurement, contender)
                progress.phase("stopping servers")
    agreement = check_agreement(searcher.samples, near_tie=config.workload.near_tie)
    differences = tuple(map(str, agreement.differences))
    return Capacities(config, tuple(searcher.found), differences, meter.read(), time.monotonic() - started)


class Searcher:
    """Search, within a budget of time, for the most streams that each way to serve can serve within limits.

    Args:
        progress: display of the measurement that runs.

    Attributes:
        found: results so far.
        samples: all measurements so far.
    """

    def __init__(self, config: ComparisonConfig, progress: Progress) -> None:
        self.progress = progress
        self.found: list[Capacity] = []
        self.samples: list[Sample] = []
        self._config = config
        self._budget = Budget(config.budget_s, time.monotonic)
        (self._prompts,) = config.workload.prompt_sets

    async def take(self, measurement: Measurement, contender: Contender) -> None:
        """Search for the most streams of a contender (a way to serve) at each round trip time, and add them to `found`.

        If its draft and target are on one machine, the longest round trip time is enough. What the time does not allow
        is left out.
        """
        rtts_ms = self._config.network.rtts_ms
        first = self.found[-1].streams if self.found else FIRST
        is_new = True
        for rtt_ms in rtts_ms if contender.topology.is_split else (max(rtts_ms),):
            measurement.servers.set_rtt(rtt_ms)
            cell = Cell(contender, self._prompts.kind, rtt_ms, first or 1)
            if not self._has_time(cell.concurrency):
                return
            if is_new:  # fills caches and buffers, and teaches a pool what its drafts can
                await self._probe(measurement, cell)
            found = await self._most(measurement, cell)
            if found.is_limit and not found.streams:  # the time was over before any number held
                return
            self.found.append(found)
            first, is_new = found.streams, False

    async def _most(self, measurement: Measurement, cell: Cell) -> Capacity:
        limit, probes = self._config.capacity or 1, list[Probe]()
        steps = search(limit, cell.concurrency)
        streams = next(steps)
        try:
            while self._has_time(streams):
                for _ in range(TRIES):
                    probes.append(await self._probe(measurement, replace(cell, concurrency=streams)))
                    if probes[-1].holds:
                        break
                streams = steps.send(probes[-1].holds)
        except StopIteration as found:
            return Capacity(cell.contender, cell.rtt_ms, found.value, tuple(probes), found.value == limit)
        held = max((probe.streams for probe in probes if probe.holds), default=0)
        return Capacity(cell.contender, cell.rtt_ms, held, tuple(probes), True)

    async def _probe(self, measurement: Measurement, cell: Cell) -> Probe:
        self.progress.phase(f"{self._budget.left_s:.0f} s left: {cell}")
        sample = await measurement.steady(cell, self._prompts.prompts, self._limit_s(cell.concurrency))
        self.samples.append(sample)
        self.progress.measured(sample)
        return probe_of(self._config, sample, max(len(self._prompts.prompts), cell.concurrency))

    def _has_time(self, streams: int) -> bool:
        return self._limit_s(streams) <= self._budget.left_s

    def _limit_s(self, streams: int) -> float:
        """Return the longest time of a measurement, in seconds; a stream that gets several prompts has time for all."""
        answers = math.ceil(len(self._prompts.prompts) / streams)
        return PATIENCE * answers * self._config.itl_s * self._config.workload.max_new_tokens + 1.0


def probe_of(config: ComparisonConfig, sample: Sample, wanted: int) -> Probe:
    """Return the figures of a sample.

    The limits of --slo count as kept only if the sample has `wanted` answers and no failure.
    """
    values = values_of([record.stats for record in sample.records])
    slow = {name: describe(each).get("p99" if name == "ttft_s" else "p90", 0.0) for name, each in values.items()}
    rounds = [item for record in sample.records for item in record.rounds[1:]]
    compute_us = [item.timings.compute_us for item in rounds if item.timings.compute_us]
    draft_us = [item.timings.draft_us for item in rounds if item.timings.compute_us]
    return Probe(
        streams=sample.cell.concurrency,
        itl_s=slow["inter_token_latency_s"],
        ttft_s=slow["ttft_s"],
        pass_s=statistics.median(compute_us or [0]) / 1e6,
        draft_share=sum(draft_us) / (sum(compute_us) or 1),
        num_drafted=_mean([item.num_draft_tokens for item in rounds]),
        tokens_per_pass=_mean([item.num_tokens for item in rounds]),
        client_share=sample.client_share,
        holds=len(sample.records) >= wanted and not sample.failures and config.workload.slo.is_met(slow),
    )


def _mean(values: Sequence[int]) -> float:
    return statistics.fmean(values) if values else 0.0
