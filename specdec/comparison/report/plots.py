"""Pictures of a report, each with its findings in words for readers without sight."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.comparison.plan.config import Contender, Load
from specdec.comparison.report.chart_style import (
    DRAFTS,
    STYLE,
    TARGET,
    bound_line,
    errors,
    look_of,
    median_line,
    name_bound,
    panels,
    powers_of_two,
    save,
)
from specdec.comparison.report.findings import Findings, round_trip
from specdec.comparison.report.service import describe
from specdec.comparison.report.summary import CellSummary, Spread
from specdec.inference.config import model_name


@dataclass(frozen=True, slots=True)
class Picture:
    """Picture that a report can have: how it is drawn, and its findings in words.

    Attributes:
        name: name of the picture's file, without its ending.
        finding: function that returns the findings as sentences; none if there is nothing to draw.
    """

    name: str
    title: str
    draw: Callable[[Findings], Figure]
    finding: Callable[[Findings], list[str]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Picture that has been drawn into a file.

    Attributes:
        finding: its findings in words, for readers who do not see it.
    """

    file: Path
    title: str
    finding: str

    @property
    def data(self) -> str:
        """Content of the file in base64, for embedding in a page."""
        return base64.b64encode(self.file.read_bytes()).decode("ascii")


def draw_all(findings: Findings, directory: Path) -> list[Drawn]:
    """Draw every picture for which there are results into a file of the directory, and return these pictures."""
    drawn = []
    with mpl.rc_context(STYLE):
        for picture in PICTURES:
            if sentences := picture.finding(findings):
                file = directory / f"{picture.name}.png"
                save(picture.draw(findings), file, findings.config, is_busy=bool(findings.busy))
                drawn.append(Drawn(file, picture.title, f"{'; '.join(sentences)}."))
    return drawn


def _drafting(findings: Findings) -> list[Contender]:
    """Return each topology with its schedule, and each endpoint, that was compared, except for the baseline."""
    return [series for series in findings.config.series if series != findings.config.baseline.series]


def _by_kind(findings: Findings, what: str) -> list[str]:
    """Return a label of the y axis for each prompt kind; `what` is the figure that the axis shows."""
    return [f"{kind.replace('_', ' ')}\n{what}" for kind in findings.kinds]


def _name(kind: str, series: Contender) -> str:
    return f"{kind.replace('_', ' ')}, {series.name}"


def _at(findings: Findings, summary: CellSummary) -> str:
    """Return the round trip time of a summary as text; empty for endpoints, whose round trip time is unknown."""
    return f" at {summary.cell.rtt_ms:g} ms" if findings.config.topologies else ""


def _over_rtt(findings: Findings, load: Load | None = None) -> Iterator[tuple[str, Contender, list[CellSummary]]]:
    for kind, series in itertools.product(findings.kinds, findings.config.series):
        if best := findings.bests(series, kind, load=load):
            yield kind, series, best


# Speed-up by prompt kind ----------------------------------------------------------------------------------------------

MAX_WIDE_BARS = 6
"""Most bars of a panel that are as wide as their labels; the labels of more bars stand upright."""


def speedup_by_kind(findings: Findings) -> Figure:
    """Draw speed-ups: a panel per round trip time, a group per prompt kind, a bar per topology.

    A dash at each bar is the theoretical limit of its speed-up.
    """
    rtts_ms = findings.config.network.rtts_ms
    names = [f"speed-up over {findings.config.baseline_name}"], [""] * len(rtts_ms)
    return panels([findings], rtts_ms, _speedup_panel, size=(3.4, 3.4), names=names)


def _speedup_panel(axes: Axes, findings: Findings, rtt_ms: float) -> None:
    for index, series in enumerate(_drafting(findings)):
        _bars(axes, findings, series, rtt_ms, index)
    alone = findings.config.baseline_name.removeprefix("the ")
    axes.axhline(1.0, color=look_of(TARGET).colour, linewidth=1.2, label=alone)
    axes.set_title(f"{findings.least_load}, {round_trip(findings.config, rtt_ms)}")
    axes.set_xticks(range(len(findings.kinds)), [kind.replace("_", " ") for kind in findings.kinds])
    axes.grid(visible=False, axis="x")
    axes.margins(y=_label_height(findings) + 0.02)  # room for the highest bar's label


def _bars(axes: Axes, findings: Findings, series: Contender, rtt_ms: float, index: int) -> None:
    num_bars, look = len(_drafting(findings)), look_of(series)
    width = 0.8 / num_bars
    for group, kind in enumerate(findings.kinds):
        best = findings.best(series, kind, rtt_ms)
        if best is None or best.speedup is None:
            continue
        x = group + (index - (num_bars - 1) / 2) * width
        speedup = best.speedup
        style = {"color": look.colour, "hatch": look.hatch, "edgecolor": "white", "label": series.name}
        axes.bar(x, speedup.median, width * 0.92, **style)  # type: ignore[arg-type]
        axes.errorbar(x, speedup.median, errors([speedup]), color="black", capsize=3, linewidth=1)
        if best.bound_speedup is not None:
            axes.hlines(best.bound_speedup, x - width * 0.46, x + width * 0.46, color="black", linestyle="--")
            name_bound(axes)
        label = {"ha": "center", "va": "bottom", "fontsize": 8, "xytext": (0, 4), "textcoords": "offset points"}
        label |= {"rotation": 90} if _has_narrow_bars(findings) else {}
        room = _label_height(findings) * _highest(findings)
        top = _free(speedup.high, [1.0, best.bound_speedup or 0.0], room=room)
        axes.annotate(f"{speedup.median:.2f}", (x, top), **label)  # type: ignore[arg-type]


def _has_narrow_bars(findings: Findings) -> bool:
    return len(_drafting(findings)) * len(findings.kinds) > MAX_WIDE_BARS


def _label_height(findings: Findings) -> float:
    """Return the height of a bar's label, as a share of the highest bar."""
    return 0.17 if _has_narrow_bars(findings) else 0.1


def _free(top: float, lines: Sequence[float], *, room: float) -> float:
    """Return the lowest height, at least `top`, at which a label of height `room` crosses none of some lines.

    Args:
        lines: heights of the horizontal lines.
    """
    for line in sorted(lines):
        top = max(top, line) if line <= top + room else top
    return top


def _highest(findings: Findings) -> float:
    """Return the height of the highest bar or dash of a theoretical limit."""
    found = [it for _, _, best in _over_rtt(findings) for it in best if it.speedup is not None]
    return max(max(it.speedup.high, it.bound_speedup or 0.0) for it in found if it.speedup)


def speedups(findings: Findings) -> list[str]:
    """Return a sentence per topology and prompt kind, with all round trip times, shortest first."""
    return [
        f"{_name(kind, series)}: {', '.join(_speedup(findings, it, it.speedup) for it in best if it.speedup)}"
        for kind, series, best in _over_rtt(findings)
        if series != findings.config.baseline.series and all(summary.speedup for summary in best)
    ]


def _speedup(findings: Findings, summary: CellSummary, speedup: Spread) -> str:
    contender = summary.cell.contender
    setting = f" with {contender.draft_name}, gamma {contender.gamma}" if findings.config.sweeps else ""
    ratio = (service := findings.at(summary.cell)) and findings.over_target(service, "end_to_end_latency_s")
    doubt = f" ({ratio.doubt})" if ratio and ratio.doubt else ""
    return f"{speedup.median:.2f} times{_at(findings, summary)}{setting}{doubt}"


# Tokens per second over the round trip time, and over concurrency -----------------------------------------------------


def tokens_over_rtt(findings: Findings) -> Figure:
    """Draw tokens per second over the round-trip time: a panel per prompt kind, a line per topology or endpoint.

    Marks are measured; dashed lines are the theoretical limit.
    """
    way = "round trip time between edge and target (ms)" if findings.config.topologies else ""
    names = [f"tokens per second, {findings.least_load}"], [way] * len(findings.kinds)
    return panels([findings], findings.kinds, _rtt_panel, size=(4.6, 3.6), names=names)


def _rtt_panel(axes: Axes, findings: Findings, kind: str) -> None:
    for series in findings.config.series:
        found = findings.bests(series, kind)
        at_ms = [summary.cell.rtt_ms for summary in found]
        _rate_line(axes, series, at_ms, found)
        if series.endpoint is None:
            look, bounds = look_of(series), [it.bound_tokens_per_s for it in found]
            bound_line(axes, at_ms, bounds, look.colour, look.mark)
    axes.set_title(f"{kind.replace('_', ' ')} prompts")
    if len(findings.config.network.rtts_ms) == 1:  # else matplotlib adds times below 0
        ends = None if findings.config.topologies else [round_trip(findings.config, 0.0)]
        axes.set_xticks(findings.config.network.rtts_ms, ends)


def tokens_over_concurrency(findings: Findings) -> Figure:
    """Draw tokens/s over requests in flight: a row per prompt kind, a column per round trip, a line per topology."""
    rtts_ms, loads = sorted(findings.config.network.rtts_ms), sorted(findings.config.workload.concurrencies)

    def panel(axes: Axes, kind: str, rtt_ms: float) -> None:
        for series in findings.config.series:
            best = [findings.best(series, kind, rtt_ms, (load, None)) for load in loads]
            found = [summary for summary in best if summary is not None]
            _rate_line(axes, series, [summary.cell.concurrency for summary in found], found)
        powers_of_two(axes, loads)
        axes.set_title(round_trip(findings.config, rtt_ms))

    names = _by_kind(findings, "tokens per second, all clients"), ["requests in flight"] * len(rtts_ms)
    return panels(findings.kinds, rtts_ms, panel, size=(3.5, 2.9), names=names)


def _rate_line(axes: Axes, series: Contender, at: Sequence[float], found: Sequence[CellSummary]) -> None:
    look, rates = look_of(series), [summary.tokens_per_s for summary in found]
    median_line(axes, at, rates, color=look.colour, marker=look.mark, label=series.name)


def _rates(findings: Findings, load: Load | None = None) -> list[str]:
    return [
        f"{_name(kind, series)}: "
        + ", ".join(f"{it.tokens_per_s.median:.0f} tokens per second{_at(findings, it)}" for it in best)
        for kind, series, best in _over_rtt(findings, load)
    ]


def _rates_of_many(findings: Findings) -> list[str]:
    concurrencies = findings.config.workload.concurrencies
    most = max(concurrencies)
    return [f"{most} requests in flight", *_rates(findings, (most, None))] if len(concurrencies) > 1 else []


# Speed-up over gamma --------------------------------------------------------------------------------------------------


def speedup_over_gamma(findings: Findings) -> Figure:
    """Draw the speed-up over gamma: a row per topology and round trip, a column per prompt kind, a line per draft.

    Dashed lines are the theoretical limit. There are usually more topologies and round trips than prompt kinds, and a
    page is too narrow for many columns.
    """
    rows = [(series, rtt_ms) for series in _drafting(findings) for rtt_ms in _rtts_of(findings, series)]
    what, over = f"speed-up over {findings.config.baseline_name}", "gamma (draft tokens per round)"
    names = [what] * len(rows), [over] * len(findings.kinds)
    return panels(rows, findings.kinds, partial(_gamma_panel, findings), size=(4.2, 2.5), names=names)


def _rtts_of(findings: Findings, series: Contender) -> list[float]:
    """Return the round trip times to draw for a topology with its schedule, or an endpoint.

    If draft and target are on one machine, the shortest one is enough, since the network then affects only the TTFT.
    """
    rtts_ms = sorted(findings.config.network.rtts_ms)
    return rtts_ms if series.topology.is_split else rtts_ms[:1]


def _gamma_panel(findings: Findings, axes: Axes, row: tuple[Contender, float], kind: str) -> None:
    series, rtt_ms = row
    here = [summary for summary in findings.at_place(series, kind, rtt_ms) if summary.speedup is not None]
    for draft, (colour, mark) in zip(findings.config.draft_models, itertools.cycle(DRAFTS), strict=False):
        line = _fastest_by_gamma(it for it in here if it.cell.contender.draft == draft)
        speedups = [it.speedup for it in line.values() if it.speedup is not None]
        name = f"draft: {model_name(Path(draft))}"
        median_line(axes, list(line), speedups, color=colour, marker=mark, label=name)
        bound_line(axes, list(line), [it.bound_speedup or 0.0 for it in line.values()], colour, mark)
    axes.set_xticks(findings.config.gammas)
    axes.axhline(1.0, color=look_of(TARGET).colour, linewidth=1.2)
    where = _name(kind, series) + (f", round trip {rtt_ms:g} ms" if series.topology.is_split else "")
    best = findings.best(series, kind, rtt_ms)
    if best is not None and best.speedup is not None:
        contender, speedup = best.cell.contender, best.speedup.median
        where += f"\nbest: {contender.draft_name}, gamma {contender.gamma}: {speedup:.2f}"
        star = {"marker": "*", "markersize": 15, "color": "black", "markeredgecolor": "white", "zorder": 5}
        axes.plot(contender.gamma or 0, speedup, linestyle="none", label="best measured", **star)  # type: ignore[arg-type]
    axes.set_title(where)


def _fastest_by_gamma(summaries: Iterable[CellSummary]) -> dict[int, CellSummary]:
    """Return the summary of each gamma: the fastest one, where several numbers of branches were measured."""
    by_speed = sorted(summaries, key=lambda summary: summary.tokens_per_s.median)
    return dict(sorted({summary.cell.contender.gamma or 0: summary for summary in by_speed}.items()))


def _speedups_of_sweep(findings: Findings) -> list[str]:
    return speedups(findings) if findings.config.sweeps else []


# Shares of requests by their latency ----------------------------------------------------------------------------------


SHOWN = {
    "ttft_s": "TTFT, ms",
    "inter_token_latency_s": "ITL, ms",
    "end_to_end_latency_s": "end to end, ms",
}
NUM_MARKS = 6


def latency_shares(findings: Findings) -> Figure:
    """Draw cumulative distributions of latencies: a row per prompt kind, a column per kind of latency.

    Each panel has a line for each topology or endpoint, at its fastest settings.
    """

    def panel(axes: Axes, kind: str, name: str) -> None:
        for series in findings.config.series:
            service = findings.served(series, kind)
            if service is not None and (values := service.values[name]):
                every = max(1, len(values) // NUM_MARKS)
                axes.ecdf(np.asarray(values) * 1e3, markevery=every, **_style(series))
        axes.set_ylim(0, 1.02)
        axes.set_title(f"{kind.replace('_', ' ')}: {SHOWN[name]}")

    where = round_trip(findings.config, min(findings.config.network.rtts_ms))
    names = [f"share of values\n{findings.least_load}, {where}"] * len(findings.kinds), [""] * len(SHOWN)
    return panels(findings.kinds, list(SHOWN), panel, size=(3.6, 2.7), names=names)


def _style(series: Contender) -> dict[str, Any]:
    look = look_of(series)
    return {"color": look.colour, "linestyle": look.line, "marker": look.mark, "markersize": 5, "label": series.name}


def _shares(findings: Findings) -> list[str]:
    sentences = []
    for kind, series in itertools.product(findings.kinds, findings.config.series):
        if service := findings.served(series, kind):
            found = service.statistics()
            half = ", ".join(
                f"{name} {found[figure]['p50'] * 1e3:.3g} and {found[figure]['p95'] * 1e3:.3g} ms"
                for figure, name in (("ttft_s", "TTFT"), ("end_to_end_latency_s", "end to end"))
            )
            sentences.append(f"{_name(kind, series)}, median and p95: {half}")
    return sentences


# Latency over the load ------------------------------------------------------------------------------------------------

PERCENT = 95
MIN_BEND = 0.15
"""Least distance of a curve from the straight line between its ends, as a share of the axes, for it to have a bend."""
_RING: dict[str, Any] = {"marker": "o", "markersize": 14, "mfc": "none", "mec": "black", "mew": 1.5}


def knee(loads: Sequence[float], latencies: Sequence[float]) -> int | None:
    """Return the index from which latency rises steeply with the load; None if it never does, or below three points.

    It is the point farthest below the line from the first to the last point, with both axes scaled to 1 (Satopaa et
    al., "Finding a 'Kneedle' in a Haystack", 2011).

    Args:
        loads: ascending loads.
        latencies: latencies at those loads.
    """
    if len(loads) < 3 or latencies[-1] <= latencies[0]:
        return None
    x, y = ((np.asarray(axis) - axis[0]) / (axis[-1] - axis[0]) for axis in (loads, latencies))
    below = x - y
    return int(below.argmax()) if below.max() >= MIN_BEND else None


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Latency of a topology with its schedule, or of an endpoint, over several loads.

    Attributes:
        loads: requests in flight, or requests per second in an open loop, ascending.
        seconds: latency at each of the loads.
    """

    series: Contender
    loads: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def knee(self) -> float | None:
        """Load at which latency begins to rise steeply; None if it never does."""
        index = knee(self.loads, self.seconds)
        return None if index is None else self.loads[index]


def load_curves(findings: Findings, kind: str, *, is_open: bool) -> list[LoadCurve]:
    """Return the 95th percentile of end-to-end times over the load, for each topology and endpoint.

    Loads are requests per second if `is_open`, else requests in flight. The round trip time is the shortest one.
    """
    loads = [load for load in findings.config.workload.loads if (load[1] is not None) is is_open]
    curves = []
    for series in findings.config.series:
        points: dict[float, float] = {}
        for concurrency, rate in sorted(loads):
            if service := findings.served(series, kind, (concurrency, rate)):
                points[rate or concurrency] = describe(service.values["end_to_end_latency_s"])[f"p{PERCENT}"]
        curves.append(LoadCurve(series, tuple(points), tuple(points.values())))
    return [curve for curve in curves if curve.loads]  # others have no answered request


def latency_over_load(findings: Findings) -> Figure:
    """Draw latency over load: a row per prompt kind, and columns for closed and open loop.

    A ring marks the knee of each line, from which latency rises steeply.
    """

    def panel(axes: Axes, kind: str, is_open: bool) -> None:
        for curve in load_curves(findings, kind, is_open=is_open):
            _load_curve(axes, curve)

    ways, where = loads_to_draw(findings), round_trip(findings.config, min(findings.config.network.rtts_ms))
    loads = [
        f"{'requests per second that come on their own' if each else 'requests in flight'}\n{where}" for each in ways
    ]
    names = _by_kind(findings, f"end to end, p{PERCENT}, ms"), loads
    return panels(findings.kinds, ways, panel, size=(4.6, 2.9), names=names)


def loads_to_draw(findings: Findings) -> list[bool]:
    """Return which plots of latency over load to draw: False for closed loops, True for open loops.

    A plot is drawn only if it has at least two measured loads.
    """
    rates = [rate for _, rate in findings.config.workload.loads]
    return [is_open for is_open in (False, True) if sum((rate is not None) is is_open for rate in rates) > 1]


def _load_curve(axes: Axes, curve: LoadCurve) -> None:
    axes.plot(curve.loads, [value * 1e3 for value in curve.seconds], **_style(curve.series))
    if curve.knee is not None:
        at = curve.loads.index(curve.knee)
        axes.plot(curve.knee, curve.seconds[at] * 1e3, linestyle="none", label="knee", **_RING)


def _knees(findings: Findings) -> list[str]:
    return [
        f"{_name(kind, curve.series)}: {_knee(curve, is_open=is_open)}"
        for is_open in loads_to_draw(findings)
        for kind in findings.kinds
        for curve in load_curves(findings, kind, is_open=is_open)
    ]


def _knee(curve: LoadCurve, *, is_open: bool) -> str:
    unit = "requests per second" if is_open else "in flight"
    if curve.knee is None:
        return f"no knee up to {max(curve.loads):g} {unit}"
    return f"latency rises steeply from {curve.knee:g} {unit}"


PICTURES = (
    Picture("speedup_by_kind", "Speed-up by prompt kind and topology", speedup_by_kind, speedups),
    Picture("tokens_over_rtt", "Tokens per second", tokens_over_rtt, _rates),
    Picture("speedup_over_gamma", "Speed-up over gamma, with the bound", speedup_over_gamma, _speedups_of_sweep),
    Picture("tokens_over_concurrency", "Tokens/s of all clients", tokens_over_concurrency, _rates_of_many),
    Picture("latency_shares", "Share of requests by latency", latency_shares, _shares),
    Picture("latency_over_load", "Latency over the load, and its knee", latency_over_load, _knees),
)
