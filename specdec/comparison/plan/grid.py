"""Grid of measurements, each way to serve under each set of conditions, and the order in which they are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from specdec.comparison.plan.config import ComparisonConfig, Contender
from specdec.comparison.plan.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid of measurements: a contender (a way to serve) under certain conditions.

    Attributes:
        kind: prompt kind.
        rtt_ms: round trip time between edge (where draft workers are) and target, in milliseconds.
        concurrency: requests in flight at once; 0 in an open loop.
        request_rate: mean requests per second of an open loop; None if each client waits for its answer.
    """

    contender: Contender
    kind: str
    rtt_ms: float
    concurrency: int
    request_rate: float | None = None

    @property
    def load(self) -> str:
        """Readable load: the requests in flight or the request rate."""
        return f"concurrency {self.concurrency}" if self.request_rate is None else f"{self.request_rate:g} requests/s"

    def __str__(self) -> str:
        return f"{self.contender.label}, {self.kind}, rtt {self.rtt_ms:g} ms, {self.load}"


WARM_UP = -1
Window = tuple[float, float]
"""Begin and end of a time span, in seconds on the clock of `RequestRecord.sent_s`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Results of one run of a measurement, that is, of one way to serve under one set of conditions.

    Attributes:
        repeat: number of the run, counted from 0; `WARM_UP` for runs before the measurement.
        records: one per answered request.
        failures: one per failed request.
        client_share: CPU time over wall time of the process that sent the requests, during this run.
        window: time span in which tokens count, for a run of a fixed time; None if all tokens count.
    """

    cell: Cell
    repeat: int
    records: tuple[RequestRecord, ...]
    failures: tuple[RequestRecord, ...] = field(default=())
    client_share: float = 0.0
    window: Window | None = None

    @property
    def num_tokens(self) -> int:
        """Number of output tokens; of a run of a fixed time, those that arrived in its window.

        Counting whole answers in the window would be inexact: many streams of equal length end at almost the same time,
        and one such wave of answers more or less may fall into the window.
        """
        if self.window is None:
            return sum(record.stats.num_output_tokens for record in self.records)
        begins_s, ends_s = self.window
        rounds = (
            (record.sent_s + each.arrived_s, each.num_tokens) for record in self.records for each in record.rounds
        )
        return sum(num_tokens for arrived_s, num_tokens in rounds if begins_s <= arrived_s < ends_s)

    @property
    def wall_s(self) -> float:
        """Seconds by which tokens are divided for tokens/s; the time of failed requests is included.

        For a run of a fixed time this is the length of its window; at concurrency 1 the sum of the times of all
        requests; else the time from the first request sent to the last one ended.
        """
        if self.window is not None:
            return self.window[1] - self.window[0]
        took = (*self.records, *self.failures)
        if self.cell.concurrency == 1:
            return sum(it.ended_s - it.sent_s for it in took)
        return max(it.ended_s for it in took) - min(it.sent_s for it in took) if took else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s if self.wall_s else 0.0


def walk(config: ComparisonConfig) -> Iterator[tuple[int, Cell]]:
    """Yield the measurements to make, in order, as pairs of the run's number, from 0, and a cell.

    A cell is a contender (a way to serve) under one set of conditions. All contenders are measured under the same
    conditions, then under the next. Which contender is first changes with each set of conditions and each run, so that
    drift (heat, other processes) favours none.
    """
    workload, network, contenders = config.workload, config.network, config.contenders
    for repeat in range(workload.num_runs):
        turn = repeat
        for concurrency, request_rate in workload.loads:
            for prompt_set in workload.prompt_sets:
                for rtt_ms in network.rtts_ms:
                    for i in range(len(contenders)):
                        contender = contenders[(turn + i) % len(contenders)]
                        yield repeat, Cell(contender, prompt_set.kind, rtt_ms, concurrency, request_rate)
                    turn += 1
