"""Pictures of latency: the share of requests that were served so fast, and how latency grows with the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from inference.comparison.plan.config import Series
from inference.comparison.report.distribution import ecdf, knee
from inference.comparison.report.findings import Findings, round_trip
from inference.comparison.report.looks import from_zero, grid, legend, line_handle, look_of

SHOWN = {
    "ttft_s": "TTFT, ms",
    "inter_token_latency_s": "ITL, ms",
    "end_to_end_latency_s": "end to end, ms",
}
NUM_MARKS = 6
PERCENT = 95


def latency_shares(findings: Findings) -> Figure:
    """A row per prompt kind, a column per figure: which share of the values is at most so large."""
    figure, rows = grid(len(findings.kinds), len(SHOWN), width=3.6, height=2.7)
    for row, kind in zip(rows, findings.kinds, strict=True):
        for axes, (name, text) in zip(row, SHOWN.items(), strict=True):
            for series in findings.config.series:
                service = findings.served(series, kind)
                if service is not None and service.values[name]:
                    _share(axes, series, service.values[name])
            axes.set_xlabel(text)
            axes.set_title(
                f"{findings.least_load}, {round_trip(findings.config, min(findings.config.network.rtts_ms))}"
            )
        row[0].set_ylabel(f"{kind.replace('_', ' ')}\nshare of values")
    legend(figure, _handles(findings))
    return figure


def _share(axes: Axes, series: Series, seconds: Sequence[float]) -> None:
    values, shares = ecdf(seconds)
    every = max(1, len(values) // NUM_MARKS)
    axes.step(values * 1e3, shares, where="post", markevery=every, **_style(series))
    axes.set_ylim(0, 1.02)


def _style(series: Series) -> dict[str, Any]:
    look = look_of(series)
    return {"color": look.colour, "linestyle": look.line, "marker": look.mark, "markersize": 5}


def _handles(findings: Findings) -> list[Line2D]:
    return [line_handle(series, linestyle=look_of(series).line, markersize=5) for series in findings.config.series]


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Latency of a series over its loads; `knee` is the load from which it rises steeply, None where it does not."""

    series: Series
    loads: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def knee(self) -> float | None:
        index = knee(self.loads, self.seconds)
        return None if index is None else self.loads[index]


def load_curves(findings: Findings, kind: str, *, is_open: bool) -> list[LoadCurve]:
    """By series: p95 end to end over requests per second (open loop) or requests in flight, at the shortest way."""
    loads = [load for load in findings.config.workload.loads if (load[1] is not None) is is_open]
    curves = []
    for series in findings.config.series:
        points: dict[float, float] = {}
        for concurrency, rate in sorted(loads):
            if service := findings.served(series, kind, (concurrency, rate)):
                found = np.percentile(service.values["end_to_end_latency_s"], PERCENT)
                points[rate or concurrency] = float(found)
        curves.append(LoadCurve(series, tuple(points), tuple(points.values())))
    return [curve for curve in curves if curve.loads]  # of others nothing was answered


def latency_over_load(findings: Findings) -> Figure:
    """A row per prompt kind, a column per way in which requests come; a ring where latency begins to rise steeply."""
    ways = loads_to_draw(findings)
    figure, rows = grid(len(findings.kinds), len(ways), width=4.6, height=2.9)
    for row, kind in zip(rows, findings.kinds, strict=True):
        for axes, is_open in zip(row, ways, strict=True):
            for curve in load_curves(findings, kind, is_open=is_open):
                _load_curve(axes, curve)
            axes.set_xlabel("requests per second that come on their own" if is_open else "requests in flight")
            axes.set_title(round_trip(findings.config, min(findings.config.network.rtts_ms)))
        row[0].set_ylabel(f"{kind.replace('_', ' ')}\nend to end, p{PERCENT}, ms")
    from_zero(rows)
    ring = Line2D([], [], linestyle="none", label="knee", **_RING)
    legend(figure, [*_handles(findings), ring])
    return figure


def loads_to_draw(findings: Findings) -> list[bool]:
    """Whether an open loop, for each way in which requests came at several loads."""
    rates = [rate for _, rate in findings.config.workload.loads]
    return [is_open for is_open in (False, True) if sum((rate is not None) is is_open for rate in rates) > 1]


_RING: dict[str, Any] = {"marker": "o", "markersize": 14, "mfc": "none", "mec": "black", "mew": 1.5}


def _load_curve(axes: Axes, curve: LoadCurve) -> None:
    axes.plot(curve.loads, [value * 1e3 for value in curve.seconds], **_style(curve.series))
    if curve.knee is not None:
        at = curve.loads.index(curve.knee)
        axes.plot(curve.knee, curve.seconds[at] * 1e3, linestyle="none", **_RING)
