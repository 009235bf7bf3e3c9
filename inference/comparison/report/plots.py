"""Pictures of speed: over prompt kinds, round trip times, gamma and concurrency. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from inference.comparison.plan.config import Series
from inference.comparison.report.findings import Findings, round_trip
from inference.comparison.report.looks import (
    DRAFTS,
    TARGET,
    errors,
    from_zero,
    grid,
    legend,
    line_handle,
    look_of,
    powers_of_two,
)
from inference.comparison.report.summary import CellSummary
from inference.config import model_name


def drafting(findings: Findings) -> list[Series]:
    """What is compared with the target alone, or with what stands for it."""
    return [series for series in findings.config.series if series != findings.config.baseline.series]


def _bound_handles(findings: Findings) -> list[Line2D]:
    """None where all that is compared are endpoints, of whose passes nobody knows."""
    if all(series.endpoint is not None for series in findings.config.series):
        return []
    return [Line2D([], [], color="black", linestyle="--", label="bound (dashes)")]


# Speed-up by prompt kind ----------------------------------------------------------------------------------------------


def speedup_by_kind(findings: Findings) -> Figure:
    """Bars: a panel per round trip time, a group per prompt kind, a bar per topology; its bound as a dash."""
    rtts_ms = findings.config.network.rtts_ms
    figure, [row] = grid(1, len(rtts_ms), width=3.4, height=3.4)
    for axes, rtt_ms in zip(row, rtts_ms, strict=True):
        for index, series in enumerate(drafting(findings)):
            _bars(axes, findings, series, rtt_ms, index)
        axes.axhline(1.0, color=look_of(TARGET).colour, linewidth=1.2)
        axes.set_title(f"{findings.least_load}, {round_trip(findings.config, rtt_ms)}")
        axes.set_xticks(range(len(findings.kinds)), [kind.replace("_", " ") for kind in findings.kinds])
        axes.grid(visible=False, axis="x")
    row[0].set_ylabel(f"speed-up over {findings.config.baseline_name}")
    handles: list[Artist] = [_bar_handle(series) for series in drafting(findings)]
    alone = Line2D([], [], color=look_of(TARGET).colour, label=findings.config.baseline_name.removeprefix("the "))
    legend(figure, [*handles, *_bound_handles(findings), alone])
    return figure


def _bar_handle(series: Series) -> Patch:
    look = look_of(series)
    return Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", label=series.name)


def _bars(axes: Axes, findings: Findings, series: Series, rtt_ms: float, index: int) -> None:
    num_bars, look = len(drafting(findings)), look_of(series)
    width = 0.8 / num_bars
    for group, kind in enumerate(findings.kinds):
        best = findings.best(series, kind, rtt_ms)
        if best is None or best.speedup is None:
            continue
        x = group + (index - (num_bars - 1) / 2) * width
        speedup = best.speedup
        axes.bar(x, speedup.median, width * 0.92, color=look.colour, hatch=look.hatch, edgecolor="white")
        axes.errorbar(x, speedup.median, errors([speedup]), color="black", capsize=3, linewidth=1)
        if best.bound_speedup is not None:
            axes.hlines(best.bound_speedup, x - width * 0.46, x + width * 0.46, color="black", linestyle="--")
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        label = {"ha": "center", "va": "bottom", "fontsize": 9, "bbox": plate}
        axes.text(x, speedup.median * 0.04, f"{speedup.median:.2f}", **label)  # type: ignore[arg-type]


# Tokens per second over the round trip time, and over concurrency -----------------------------------------------------


def tokens_over_rtt(findings: Findings) -> Figure:
    """Lines: a panel per prompt kind, marks for what was measured, dashes for the bound."""
    figure, [row] = grid(1, len(findings.kinds), width=4.6, height=3.6)
    for axes, kind in zip(row, findings.kinds, strict=True):
        for series in findings.config.series:
            best = [findings.best(series, kind, rtt_ms) for rtt_ms in sorted(findings.config.network.rtts_ms)]
            found = [summary for summary in best if summary is not None]
            at_ms = [summary.cell.rtt_ms for summary in found]
            _rates(axes, series, at_ms, found)
            if series.endpoint is None:
                look, bounds = look_of(series), [it.bound_tokens_per_s for it in found]
                _dashes(axes, at_ms, bounds, look.colour, look.mark)
        axes.set_title(f"{kind.replace('_', ' ')} prompts")
        axes.set_xlabel("round trip time between edge and target (ms)" if findings.config.topologies else "")
        if len(findings.config.network.rtts_ms) == 1:  # else matplotlib invents times below 0
            names = None if findings.config.topologies else [round_trip(findings.config, 0.0)]
            axes.set_xticks(findings.config.network.rtts_ms, names)
    from_zero([row])
    row[0].set_ylabel(f"tokens per second, {findings.least_load}")
    legend(figure, [*(line_handle(series) for series in findings.config.series), *_bound_handles(findings)])
    return figure


def tokens_over_concurrency(findings: Findings) -> Figure:
    """A row per prompt kind, a column per round trip time, a line per topology."""
    rtts_ms, loads = sorted(findings.config.network.rtts_ms), sorted(findings.config.workload.concurrencies)
    figure, rows = grid(len(findings.kinds), len(rtts_ms), width=3.5, height=2.9)
    for row, kind in zip(rows, findings.kinds, strict=True):
        for axes, rtt_ms in zip(row, rtts_ms, strict=True):
            for series in findings.config.series:
                best = [findings.best(series, kind, rtt_ms, (load, None)) for load in loads]
                found = [summary for summary in best if summary is not None]
                _rates(axes, series, [summary.cell.concurrency for summary in found], found)
            powers_of_two(axes, loads)
            axes.set_title(round_trip(findings.config, rtt_ms))
        row[0].set_ylabel(f"{kind.replace('_', ' ')}\ntokens per second, all clients")
    from_zero(rows)
    for axes in rows[-1]:
        axes.set_xlabel("requests in flight")
    legend(figure, [line_handle(series) for series in findings.config.series])
    return figure


def _rates(axes: Axes, series: Series, at: Sequence[float], found: Sequence[CellSummary]) -> None:
    rates, look = [summary.tokens_per_s for summary in found], look_of(series)
    axes.errorbar(at, [rate.median for rate in rates], errors(rates), color=look.colour, marker=look.mark, capsize=3)


def _dashes(axes: Axes, at: Sequence[float], bounds: Sequence[float], colour: str, mark: str) -> None:
    """What theory allows where something was measured."""
    axes.plot(at, bounds, color=colour, linestyle="--", linewidth=1.2, marker=mark, markerfacecolor="white")


# Speed-up over gamma --------------------------------------------------------------------------------------------------


def speedup_over_gamma(findings: Findings) -> Figure:
    """A row per prompt kind, a column per place of the network; a line per draft, dashes for bounds, a star on top."""
    columns = [(series, rtt_ms) for series in drafting(findings) for rtt_ms in _rtts_of(findings, series)]
    figure, rows = grid(len(findings.kinds), len(columns), width=3.5, height=2.9)
    for row, kind in zip(rows, findings.kinds, strict=True):
        for axes, (series, rtt_ms) in zip(row, columns, strict=True):
            _over_gamma(axes, findings, series, kind, rtt_ms)
        row[0].set_ylabel(f"{kind.replace('_', ' ')}\nspeed-up over {findings.config.baseline_name}")
    from_zero(rows)
    for axes in rows[-1]:
        axes.set_xlabel("gamma (draft tokens per round)")
    star = Line2D([], [], color="black", marker="*", markersize=11, linestyle="none", label="best measured")
    legend(figure, [*_draft_handles(findings), *_bound_handles(findings), star])
    return figure


def _rtts_of(findings: Findings, series: Series) -> list[float]:
    """Fused does not depend on the network but for TTFT: one column is enough."""
    rtts_ms = sorted(findings.config.network.rtts_ms)
    return rtts_ms if series.topology.is_split else rtts_ms[:1]


def _draft_handles(findings: Findings) -> list[Line2D]:
    names = [model_name(Path(draft)) for draft in findings.config.draft_models]
    looks = zip(names, DRAFTS, strict=False)
    return [Line2D([], [], color=colour, marker=mark, label=f"draft: {name}") for name, (colour, mark) in looks]


def _over_gamma(axes: Axes, findings: Findings, series: Series, kind: str, rtt_ms: float) -> None:
    here = [summary for summary in findings.at_place(series, kind, rtt_ms) if summary.speedup is not None]
    for draft, (colour, mark) in zip(findings.config.draft_models, DRAFTS, strict=False):
        _gamma_line(axes, _fastest_by_gamma(it for it in here if it.cell.contender.draft == draft), colour, mark)
    axes.set_xticks(findings.config.gammas)
    axes.axhline(1.0, color=look_of(TARGET).colour, linewidth=1.2)
    where = f"{series.name}, round trip {rtt_ms:g} ms" if series.topology.is_split else series.name
    best = findings.best(series, kind, rtt_ms)
    if best is not None and best.speedup is not None:
        contender, speedup = best.cell.contender, best.speedup.median
        where += f"\nbest: {contender.draft_name}, gamma {contender.gamma}: {speedup:.2f}"
        star = {"marker": "*", "markersize": 15, "color": "black", "markeredgecolor": "white", "zorder": 5}
        axes.plot(contender.gamma or 0, speedup, linestyle="none", **star)  # type: ignore[arg-type]
    axes.set_title(where)


def _fastest_by_gamma(summaries: Iterable[CellSummary]) -> dict[int, CellSummary]:
    """Where several numbers of branches were measured, the best of them."""
    by_speed = sorted(summaries, key=lambda summary: summary.tokens_per_s.median)
    return dict(sorted({summary.cell.contender.gamma or 0: summary for summary in by_speed}.items()))


def _gamma_line(axes: Axes, line: dict[int, CellSummary], colour: str, mark: str) -> None:
    gammas, speedups = list(line), [it.speedup for it in line.values() if it.speedup is not None]
    style = {"color": colour, "marker": mark, "capsize": 3}
    axes.errorbar(gammas, [item.median for item in speedups], errors(speedups), **style)  # type: ignore[arg-type]
    _dashes(axes, gammas, [summary.bound_speedup or 0.0 for summary in line.values()], colour, mark)
