"""Figures of single requests and of all together, with LLMPerf's names, and their failures and goodput."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from specdec.comparison.plan.grid import Cell, Sample
from specdec.comparison.plan.record import RequestRecord
from specdec.comparison.plan.slo import Slo
from specdec.comparison.report.bootstrap import Ratio, paired_ratio
from specdec.inference.observe.stats import RequestStats

LATENCIES = ("ttft_s", "inter_token_latency_s", "end_to_end_latency_s")
QUANTILES = (25, 50, 75, 90, 95, 99)
Figures: TypeAlias = dict[str, float | None]


def describe(values: Sequence[float]) -> dict[str, float]:
    """Return p25 to p99 (linearly interpolated), mean, min, max and stddev of a sample; empty for no values."""
    if not values:
        return {}
    quantiles = np.percentile(values, QUANTILES)
    named = {f"p{quantile}": float(value) for quantile, value in zip(QUANTILES, quantiles, strict=True)}
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {**named, "mean": float(np.mean(values)), "min": min(values), "max": max(values), "stddev": spread}


def figures_of(stats: RequestStats) -> Figures:
    """Return an answer's figures, times in seconds, not rounded; None for the time between tokens of a single token.

    inter_token_latency_s is (end to end - TTFT) / (output tokens - 1), however tokens were grouped in messages.
    """
    return {
        "ttft_s": stats.ttft_s,
        "inter_token_latency_s": stats.tpot_s,
        "end_to_end_latency_s": stats.end_to_end_s,
        "request_output_throughput_token_per_s": stats.tokens_per_s,
        "number_input_tokens": float(stats.num_prompt_tokens),
        "number_output_tokens": float(stats.num_output_tokens),
    }


def values_of(answers: Sequence[RequestStats]) -> dict[str, list[float]]:
    """Return the values of every figure of some answers, by the names of the figures; unknown values are left out.

    Among them, as message_gap_s, are the seconds between messages, each of which may have several tokens.
    """
    figures = [figures_of(stats) for stats in answers]
    values = {name: [it[name] for it in figures] for name in figures_of(RequestStats())}
    known = {name: [value for value in column if value is not None] for name, column in values.items()}
    return {**known, "message_gap_s": [gap for stats in answers for gap in stats.itl_s]}


@dataclass(frozen=True, slots=True)
class Service:
    """Figures of how the requests of one cell (a way to serve under one set of conditions) were served in all its runs.

    Attributes:
        requests: for each request its figures, its error code (None if answered), the numbers of its run and prompt
            (from 0), and when it was sent, in milliseconds since the epoch.
        values: values of all answered requests, by name of figure.
        wall_s: seconds of all runs together.
        num_good: number of answers within the limits of --slo.
    """

    cell: Cell
    requests: tuple[dict[str, Any], ...]
    values: dict[str, list[float]]
    wall_s: float
    num_good: int

    @classmethod
    def of(cls, samples: Sequence[Sample], slo: Slo) -> Service:
        """Return the figures of the runs in `samples`, of which there must be at least one; all are of one cell."""
        requests = [
            _request(record, sample.repeat)
            for sample in samples
            for record in sorted((*sample.records, *sample.failures), key=lambda record: record.sent_s)
        ]
        good = sum(request["error_code"] is None and slo.is_met(request) for request in requests)
        values = values_of([record.stats for sample in samples for record in sample.records])
        return cls(samples[0].cell, tuple(requests), values, sum(sample.wall_s for sample in samples), good)

    @property
    def errors(self) -> Counter[str]:
        """Number of failed requests, by error code."""
        return Counter(request["error_code"] for request in self.requests if request["error_code"] is not None)

    @property
    def num_failed(self) -> int:
        return self.errors.total()

    @property
    def num_answered(self) -> int:
        return len(self.requests) - self.num_failed

    def over(self, alone: Service, figure: str) -> Ratio | None:
        """Return the mean ratio of a figure here to the same figure of the service `alone`, with its interval.

        The ratio is above 1 if the figure is larger here. It is the geometric mean over pairs of requests with the same
        prompt in the same run; None if there is no pair.

        Args:
            alone: service of the baseline under the same conditions.
            figure: name of the figure, such as "ttft_s".
        """
        here, there = (_by_turn(service.requests, figure) for service in (self, alone))
        both = sorted(here.keys() & there.keys())
        return paired_ratio([there[key] for key in both], [here[key] for key in both]) if both else None

    def statistics(self) -> dict[str, Any]:
        """Return p25 to p99, mean, min, max and stddev of each figure, and rates and counts of the requests."""
        return {
            **{name: describe(values) for name, values in self.values.items()},
            "num_requests_started": len(self.requests),
            "num_completed_requests": self.num_answered,
            "num_completed_requests_per_min": self._per_s(60 * self.num_answered),
            "mean_output_throughput_token_per_s": self._per_s(sum(self.values["number_output_tokens"])),
            "number_errors": self.num_failed,
            "error_rate": self.num_failed / len(self.requests),
            "error_code_frequency": dict(self.errors),
            "goodput_requests_per_s": self._per_s(self.num_good),
            "goodput_share": self.num_good / len(self.requests),
        }

    def _per_s(self, count: float) -> float:
        return count / self.wall_s if self.wall_s else 0.0


def _request(record: RequestRecord, run: int) -> dict[str, Any]:
    total = record.stats.num_prompt_tokens + record.stats.num_output_tokens
    failed = {"error_code": record.error_code, "error_msg": record.error_message}
    return {
        "run": run,
        "prompt": record.prompt_index,
        "timestamp_ms": round(1e3 * (time.time() - time.monotonic() + record.sent_s)),
        **failed,
        **figures_of(record.stats),
        "number_total_tokens": total,
    }


def _by_turn(requests: Sequence[dict[str, Any]], figure: str) -> dict[tuple[int, int, int], float]:
    """Return a figure of answered requests, by run, prompt, and count of earlier requests with that prompt in that run.

    Values of 0 and None are left out.
    """
    found: dict[tuple[int, int, int], float] = {}
    turns: dict[tuple[int, int], int] = defaultdict(int)
    for request in requests:
        key = request["run"], request["prompt"]
        if request["error_code"] is None and request[figure]:
            found[*key, turns[key]] = request[figure]
        turns[key] += 1
    return found
