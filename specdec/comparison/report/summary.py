"""Summaries of a comparison: one per cell, which is a way to serve under one set of conditions.

A summary has the medians over the cell's runs, their range, and the theoretical bound of its speed (bound.py).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from specdec.comparison.plan.config import ALONE, LOOKUP, ComparisonConfig, Contender
from specdec.comparison.plan.grid import WARM_UP, Cell, Sample
from specdec.comparison.plan.record import RequestRecord
from specdec.comparison.report import bound
from specdec.comparison.report.service import Service
from specdec.inference.observe.stats import RequestStats

_Group = tuple[Contender, str, int]  # contender, prompt kind, concurrency


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest value of a figure over the runs of one measurement."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CellSummary:
    """Figures of one cell, which is a way to serve under one set of conditions; times are in seconds.

    A time is the median over the cell's requests.

    Attributes:
        tokens_per_s: output tokens of all requests / time spent on them, in each run.
        tpot_s: time per token after the first of an answer; None if no answer has two.
        acceptance_rate: accepted over verified draft tokens; None if none was verified.
        alpha: probability that a draft token is accepted, given that all before it in its round were.
        mean_acceptance_length: tokens per pass that verified draft tokens; None if no pass did.
        wire_bytes_per_token: bytes between draft worker and target, both ways, per output token; None if unknown.
        speedup: tokens/s over those of the baseline in the same run; None without a baseline.
        costs: measured times from which the limit below is computed, pooled over the round trip times.
        bound_tokens_per_s: theoretical upper limit of tokens/s, see bound.py; 0 for endpoints.
        bound_speedup: this limit over that of the baseline; None without a baseline, and for endpoints.
        is_estimated: whether tokens of some answers are estimates, since the server does not count them.
        cached_share: share of the prompts' tokens that the server took from its prefix cache.
        drafting_share: share of the passes for which drafting was on.
        client_share: CPU time over wall time of the process that sent the requests, median over the runs.
    """

    cell: Cell
    num_requests: int
    tokens_per_s: Spread
    ttft_s: float
    tpot_s: float | None
    end_to_end_s: float
    acceptance_rate: float | None
    drafting_share: float | None
    alpha: float | None
    mean_acceptance_length: float | None
    wire_bytes_per_token: float | None
    speedup: Spread | None
    costs: bound.Costs
    bound_tokens_per_s: float
    bound_speedup: float | None
    is_estimated: bool
    cached_share: float
    client_share: float

    @property
    def percent_of_bound(self) -> float:
        return 100.0 * self.tokens_per_s.median / self.bound_tokens_per_s if self.bound_tokens_per_s else 0.0


@dataclass(frozen=True, slots=True)
class Theory:
    """Inputs of the theoretical upper limit of speed, for one way to serve, kind of prompts and concurrency.

    Attributes:
        costs: measured times of passes and draft steps.
        answers: for each different answer, which source has each of its tokens before the target computes it.
        concurrency: requests in flight, by which the rate of one request is multiplied.
    """

    contender: Contender
    costs: bound.Costs
    answers: Sequence[bound.Hits]
    concurrency: int

    def tokens_per_s(self, rtt_s: float, *, client_is_far: bool) -> float:
        """Return the theoretical upper limit of tokens/s; 0 for an endpoint, since its drafting is unknown.

        Args:
            rtt_s: round trip time between edge and target.
            client_is_far: whether the client's requests cross this network.
        """
        if self.contender.endpoint is not None:
            return 0.0
        topology, runs_ahead = self.contender.topology, self.contender.runs_ahead
        link_s = rtt_s if topology.is_split else 0.0
        # Rounds include their round trips; with a draft that runs ahead, the request and its first answer take one.
        further_s = self.costs.prompt_s + (client_is_far + (topology.serves_at_edge and runs_ahead)) * rtt_s
        seconds = sum(
            further_s + bound.answer_s(hits, self.costs, rtt_s=link_s, runs_ahead=runs_ahead) for hits in self.answers
        )
        return self.concurrency * sum(map(len, self.answers)) / seconds if seconds else 0.0


class Summarizer:
    """Computation of figures from the samples of a comparison, without those of its warm-up.

    A cell, here, is a way to serve under one set of conditions.
    """

    def __init__(self, config: ComparisonConfig, samples: Sequence[Sample]) -> None:
        self._config = config
        self._by_cell: dict[Cell, list[Sample]] = defaultdict(list)
        self._by_group: dict[_Group, list[RequestRecord]] = defaultdict(list)
        for sample in (each for each in samples if each.repeat != WARM_UP):
            cell = sample.cell
            self._by_cell[cell].append(sample)
            self._by_group[cell.contender, cell.kind, cell.concurrency].extend(sample.records)

    def cells(self) -> list[Cell]:
        """Return the measured cells (ways to serve under given conditions) by kind, load, RTT and way to serve."""
        contenders, loads = self._config.contenders, self._config.workload.loads
        kinds = [prompt_set.kind for prompt_set in self._config.workload.prompt_sets]

        def rank(cell: Cell) -> tuple[float, ...]:
            load = loads.index((cell.concurrency, cell.request_rate))
            return kinds.index(cell.kind), load, cell.rtt_ms, contenders.index(cell.contender)

        return sorted(self._by_cell, key=rank)

    def summaries(self) -> list[CellSummary]:
        """Return the figures of each cell (a way to serve under given conditions) with an answered request."""
        return [self._summary(cell) for cell in self.cells() if self._answered(cell)]

    def _answered(self, cell: Cell) -> list[Sample]:
        """Return those runs of a cell (a way to serve under given conditions) in which a request was answered."""
        return [sample for sample in self._by_cell[cell] if sample.records]

    def service(self, cell: Cell) -> Service:
        """Return how the requests of a cell (a way to serve under given conditions) were served, over all runs."""
        return Service.of(self._by_cell[cell], self._config.workload.slo)

    def theory(self, contender: Contender, kind: str, concurrency: int) -> Theory:
        """Return the inputs of the theoretical speed limit of a contender, which is a way to serve.

        Runs at all round trip times are pooled, since pass times and acceptance do not depend on the round trip.
        """
        records = self._by_group.get((contender, kind, concurrency), [])
        alone = self._by_group.get((ALONE, kind, concurrency))
        known = self._hits(contender, kind)
        return Theory(
            contender=contender,
            costs=bound.measured_costs(records, contender.gamma or 0, alone=alone),
            answers=[known[each] for each in {(record.prompt_index, record.token_ids) for record in records}],
            concurrency=concurrency,
        )

    def _hits(self, contender: Contender, kind: str) -> dict[bound.Answer, bound.Hits]:
        """Return for each answer which source has each of its tokens before the target computes it.

        The answers of all contenders (ways to serve) with the same draft are used, since the topology does not matter.
        """
        records = (
            record
            for (other, its_kind, _), records in self._by_group.items()
            if (other.draft, its_kind) == (contender.draft, kind)
            for record in records
        )
        return bound.hits_of(records, has_draft=contender.draft not in (None, LOOKUP))

    def _bound(self, cell: Cell) -> float:
        """Return the theoretical upper limit of a cell's tokens/s; a cell is a way to serve under given conditions."""
        network = self._config.network
        # Jitter adds half of its maximum on average, in each direction.
        rtt_s = (cell.rtt_ms + network.jitter_ms) / 1e3
        theory = self.theory(cell.contender, cell.kind, cell.concurrency)
        is_far = network.is_crossed(at_edge=cell.contender.topology.serves_at_edge)
        return theory.tokens_per_s(rtt_s, client_is_far=is_far)

    def _summary(self, cell: Cell) -> CellSummary:
        samples = self._answered(cell)
        records = [record for sample in samples for record in sample.records]
        stats = [record.stats for record in records]
        rounds = [item for record in records for item in record.rounds]
        pooled = RequestStats.of(((item.arrived_s, item, item.num_tokens) for item in rounds), num_prompt_tokens=0)
        return CellSummary(
            cell=cell,
            num_requests=len(records),
            tokens_per_s=_spread([sample.tokens_per_s for sample in samples]),
            ttft_s=statistics.median(item.ttft_s for item in stats),
            tpot_s=_median(item.tpot_s for item in stats),
            end_to_end_s=statistics.median(item.end_to_end_s for item in stats),
            acceptance_rate=pooled.acceptance_rate,
            drafting_share=pooled.drafting_share,
            alpha=bound.acceptance_probability(rounds),
            mean_acceptance_length=pooled.mean_acceptance_length,
            wire_bytes_per_token=pooled.wire_bytes / max(1, pooled.num_output_tokens) or None,
            speedup=self._speedup(cell),
            costs=self.theory(cell.contender, cell.kind, cell.concurrency).costs,
            bound_tokens_per_s=self._bound(cell),
            bound_speedup=self._bound_speedup(cell),
            is_estimated=any(record.is_estimated for record in records),
            cached_share=sum(it.num_cached_tokens for it in records)
            / max(1, sum(it.num_prompt_tokens for it in records)),
            client_share=statistics.median(sample.client_share for sample in samples),
        )

    def _speedup(self, cell: Cell) -> Spread | None:
        """Return the speed-up of a cell (a way to serve under given conditions) over the baseline in the same run.

        None if there is no run in which both have answered a request.
        """
        alone = {sample.repeat: sample.tokens_per_s for sample in self._by_cell.get(self._alone(cell), [])}
        ratios = [
            sample.tokens_per_s / alone[sample.repeat]
            for sample in self._answered(cell)
            if alone.get(sample.repeat, 0.0) > 0
        ]
        return _spread(ratios) if ratios else None

    def _bound_speedup(self, cell: Cell) -> float | None:
        alone = self._alone(cell)
        if alone not in self._by_cell or cell.contender.endpoint is not None:
            return None
        of_alone = self._bound(alone)
        return self._bound(cell) / of_alone if of_alone else None

    def _alone(self, cell: Cell) -> Cell:
        return replace(cell, contender=self._config.baseline)


def spread_of(summaries: Iterable[CellSummary]) -> float:
    """Return how much equal runs differ: tokens/s of the fastest over those of the slowest, median over measurements.

    Open loops do not count, since their rate is given. 1 if nothing else was measured.
    """
    closed = [summary.tokens_per_s for summary in summaries if summary.cell.request_rate is None]
    return _median(it.high / it.low for it in closed if it.low) or 1.0


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
