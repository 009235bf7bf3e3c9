"""Pictures of latency: the share of requests that were served so fast, and how latency grows with the load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from comparison.plan.config import Contender
from comparison.report.distribution import knee
from comparison.report.findings import Findings, round_trip
from comparison.report.looks import look_of, panels
from comparison.report.plots import by_kind

SHOWN = {
    "ttft_s": "TTFT, ms",
    "inter_token_latency_s": "ITL, ms",
    "end_to_end_latency_s": "end to end, ms",
}
NUM_MARKS = 6
PERCENT = 95


def latency_shares(findings: Findings) -> Figure:
    """A row per prompt kind, a column per figure: which share of the values is at most so large."""

    def panel(axes: Axes, kind: str, name: str) -> None:
        for series in findings.config.series:
            service = findings.served(series, kind)
            if service is not None and (values := service.values[name]):
                every = max(1, len(values) // NUM_MARKS)
                axes.ecdf(np.asarray(values) * 1e3, markevery=every, **_style(series))
        axes.set_ylim(0, 1.02)
        axes.set_title(f"{findings.least_load}, {round_trip(findings.config, min(findings.config.network.rtts_ms))}")

    names = by_kind(findings, "share of values"), list(SHOWN.values())
    return panels(findings.kinds, list(SHOWN), panel, size=(3.6, 2.7), names=names)


def _style(series: Contender) -> dict[str, Any]:
    look = look_of(series)
    return {"color": look.colour, "linestyle": look.line, "marker": look.mark, "markersize": 5, "label": series.name}


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Latency of a series over its loads; `knee` is the load from which it rises steeply, None where it does not."""

    series: Contender
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

    def panel(axes: Axes, kind: str, is_open: bool) -> None:
        for curve in load_curves(findings, kind, is_open=is_open):
            _load_curve(axes, curve)
        axes.set_title(round_trip(findings.config, min(findings.config.network.rtts_ms)))

    ways = loads_to_draw(findings)
    loads = ["requests per second that come on their own" if is_open else "requests in flight" for is_open in ways]
    names = by_kind(findings, f"end to end, p{PERCENT}, ms"), loads
    return panels(findings.kinds, ways, panel, size=(4.6, 2.9), names=names)


def loads_to_draw(findings: Findings) -> list[bool]:
    """Whether an open loop, for each way in which requests came at several loads."""
    rates = [rate for _, rate in findings.config.workload.loads]
    return [is_open for is_open in (False, True) if sum((rate is not None) is is_open for rate in rates) > 1]


_RING: dict[str, Any] = {"marker": "o", "markersize": 14, "mfc": "none", "mec": "black", "mew": 1.5}


def _load_curve(axes: Axes, curve: LoadCurve) -> None:
    axes.plot(curve.loads, [value * 1e3 for value in curve.seconds], **_style(curve.series))
    if curve.knee is not None:
        at = curve.loads.index(curve.knee)
        axes.plot(curve.knee, curve.seconds[at] * 1e3, linestyle="none", label="knee", **_RING)
