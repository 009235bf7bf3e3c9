"""Pictures of speed: over prompt kinds, round trip times, gamma and concurrency. Computes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from comparison.plan.config import Contender
from comparison.report.findings import Findings, round_trip
from comparison.report.looks import (
    DRAFTS,
    TARGET,
    bound_line,
    errors,
    look_of,
    median_line,
    name_bound,
    panels,
    powers_of_two,
)
from comparison.report.summary import CellSummary
from inference.config import model_name


def drafting(findings: Findings) -> list[Contender]:
    """What is compared with the target alone, or with what stands for it."""
    return [series for series in findings.config.series if series != findings.config.baseline.series]


# Speed-up by prompt kind ----------------------------------------------------------------------------------------------


def speedup_by_kind(findings: Findings) -> Figure:
    """Bars: a panel per round trip time, a group per prompt kind, a bar per topology; its bound as a dash."""
    rtts_ms = findings.config.network.rtts_ms
    names = [f"speed-up over {findings.config.baseline_name}"], [""] * len(rtts_ms)
    return panels([findings], rtts_ms, _speedups, size=(3.4, 3.4), names=names)


def _speedups(axes: Axes, findings: Findings, rtt_ms: float) -> None:
    for index, series in enumerate(drafting(findings)):
        _bars(axes, findings, series, rtt_ms, index)
    alone = findings.config.baseline_name.removeprefix("the ")
    axes.axhline(1.0, color=look_of(TARGET).colour, linewidth=1.2, label=alone)
    axes.set_title(f"{findings.least_load}, {round_trip(findings.config, rtt_ms)}")
    axes.set_xticks(range(len(findings.kinds)), [kind.replace("_", " ") for kind in findings.kinds])
    axes.grid(visible=False, axis="x")


def _bars(axes: Axes, findings: Findings, series: Contender, rtt_ms: float, index: int) -> None:
    num_bars, look = len(drafting(findings)), look_of(series)
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
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        label = {"ha": "center", "va": "bottom", "fontsize": 9, "bbox": plate}
        axes.text(x, speedup.median * 0.04, f"{speedup.median:.2f}", **label)  # type: ignore[arg-type]


# Tokens per second over the round trip time, and over concurrency -----------------------------------------------------


def tokens_over_rtt(findings: Findings) -> Figure:
    """Lines: a panel per prompt kind, marks for what was measured, dashes for the bound."""
    way = "round trip time between edge and target (ms)" if findings.config.topologies else ""
    names = [f"tokens per second, {findings.least_load}"], [way] * len(findings.kinds)
    return panels([findings], findings.kinds, _over_rtt, size=(4.6, 3.6), names=names)


def _over_rtt(axes: Axes, findings: Findings, kind: str) -> None:
    for series in findings.config.series:
        found = findings.bests(series, kind)
        at_ms = [summary.cell.rtt_ms for summary in found]
        _rates(axes, series, at_ms, found)
        if series.endpoint is None:
            look, bounds = look_of(series), [it.bound_tokens_per_s for it in found]
            bound_line(axes, at_ms, bounds, look.colour, look.mark)
    axes.set_title(f"{kind.replace('_', ' ')} prompts")
    if len(findings.config.network.rtts_ms) == 1:  # else matplotlib invents times below 0
        ends = None if findings.config.topologies else [round_trip(findings.config, 0.0)]
        axes.set_xticks(findings.config.network.rtts_ms, ends)


def tokens_over_concurrency(findings: Findings) -> Figure:
    """A row per prompt kind, a column per round trip time, a line per topology."""
    rtts_ms, loads = sorted(findings.config.network.rtts_ms), sorted(findings.config.workload.concurrencies)

    def panel(axes: Axes, kind: str, rtt_ms: float) -> None:
        for series in findings.config.series:
            best = [findings.best(series, kind, rtt_ms, (load, None)) for load in loads]
            found = [summary for summary in best if summary is not None]
            _rates(axes, series, [summary.cell.concurrency for summary in found], found)
        powers_of_two(axes, loads)
        axes.set_title(round_trip(findings.config, rtt_ms))

    names = by_kind(findings, "tokens per second, all clients"), ["requests in flight"] * len(rtts_ms)
    return panels(findings.kinds, rtts_ms, panel, size=(3.5, 2.9), names=names)


def by_kind(findings: Findings, what: str) -> list[str]:
    """Names of a y axis, for a row per prompt kind."""
    return [f"{kind.replace('_', ' ')}\n{what}" for kind in findings.kinds]


def _rates(axes: Axes, series: Contender, at: Sequence[float], found: Sequence[CellSummary]) -> None:
    look, rates = look_of(series), [summary.tokens_per_s for summary in found]
    median_line(axes, at, rates, color=look.colour, marker=look.mark, label=series.name)


# Speed-up over gamma --------------------------------------------------------------------------------------------------


def speedup_over_gamma(findings: Findings) -> Figure:
    """A row per prompt kind, a column per place of the network; a line per draft, dashes for bounds, a star on top."""
    columns = [(series, rtt_ms) for series in drafting(findings) for rtt_ms in _rtts_of(findings, series)]
    what = by_kind(findings, f"speed-up over {findings.config.baseline_name}")
    names = what, ["gamma (draft tokens per round)"] * len(columns)
    return panels(findings.kinds, columns, partial(_over_gamma, findings), size=(3.5, 2.9), names=names)


def _rtts_of(findings: Findings, series: Contender) -> list[float]:
    """Fused does not depend on the network but for TTFT: one column is enough."""
    rtts_ms = sorted(findings.config.network.rtts_ms)
    return rtts_ms if series.topology.is_split else rtts_ms[:1]


def _over_gamma(findings: Findings, axes: Axes, kind: str, column: tuple[Contender, float]) -> None:
    series, rtt_ms = column
    here = [summary for summary in findings.at_place(series, kind, rtt_ms) if summary.speedup is not None]
    for draft, (colour, mark) in zip(findings.config.draft_models, itertools.cycle(DRAFTS), strict=False):
        line = _fastest_by_gamma(it for it in here if it.cell.contender.draft == draft)
        speedups = [it.speedup for it in line.values() if it.speedup is not None]
        name = f"draft: {model_name(Path(draft))}"
        median_line(axes, list(line), speedups, color=colour, marker=mark, label=name)
        bound_line(axes, list(line), [it.bound_speedup or 0.0 for it in line.values()], colour, mark)
    axes.set_xticks(findings.config.gammas)
    axes.axhline(1.0, color=look_of(TARGET).colour, linewidth=1.2)
    where = f"{series.name}, round trip {rtt_ms:g} ms" if series.topology.is_split else series.name
    best = findings.best(series, kind, rtt_ms)
    if best is not None and best.speedup is not None:
        contender, speedup = best.cell.contender, best.speedup.median
        where += f"\nbest: {contender.draft_name}, gamma {contender.gamma}: {speedup:.2f}"
        star = {"marker": "*", "markersize": 15, "color": "black", "markeredgecolor": "white", "zorder": 5}
        axes.plot(contender.gamma or 0, speedup, linestyle="none", label="best measured", **star)  # type: ignore[arg-type]
    axes.set_title(where)


def _fastest_by_gamma(summaries: Iterable[CellSummary]) -> dict[int, CellSummary]:
    """Where several numbers of branches were measured, the best of them."""
    by_speed = sorted(summaries, key=lambda summary: summary.tokens_per_s.median)
    return dict(sorted({summary.cell.contender.gamma or 0: summary for summary in by_speed}.items()))
