"""Pictures of speed: over prompt kinds, round trip times, gamma and concurrency. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from inference.comparison.plan.config import Contender, Series, Topology
from inference.comparison.plan.grid import Cell
from inference.comparison.report.findings import Findings
from inference.comparison.report.looks import (
    COLOURS,
    DRAFT_COLOURS,
    DRAFT_MARKS,
    HATCHES,
    MARKS,
    TARGET,
    errors,
    from_zero,
    grid,
    legend,
    line_handle,
)
from inference.comparison.report.summary import CellSummary, Spread, Theory
from inference.comparison.run.topologies import crosses_network
from inference.config import model_name

NUM_CURVE_POINTS = 60


def drafting(findings: Findings) -> list[Series]:
    """What is compared with the target alone, or with what stands for it."""
    return [series for series in findings.config.series if series != findings.config.baseline.series]


def _bound_handle() -> Line2D:
    return Line2D([], [], color="black", linestyle="--", label="bound (dashes)")


# Speed-up by prompt kind ----------------------------------------------------------------------------------------------


def speedup_by_kind(findings: Findings) -> Figure:
    """Bars: a panel per round trip time, a group per prompt kind, a bar per topology; its bound as a dash."""
    rtts_ms = findings.config.network.rtts_ms
    figure, [row] = grid(1, len(rtts_ms), width=3.4, height=3.4)
    for axes, rtt_ms in zip(row, rtts_ms, strict=True):
        for index, series in enumerate(drafting(findings)):
            _bars(axes, findings, series, rtt_ms, index)
        axes.axhline(1.0, color=COLOURS[TARGET], linewidth=1.2)
        axes.set_title(f"round trip {rtt_ms:g} ms")
        axes.set_xticks(range(len(findings.kinds)), [kind.replace("_", " ") for kind in findings.kinds])
        axes.grid(visible=False, axis="x")
    row[0].set_ylabel(f"speed-up over {findings.config.baseline_name}")
    handles: list[Artist] = [_bar_handle(series) for series in drafting(findings)]
    alone = Line2D([], [], color=COLOURS[TARGET], label=findings.config.baseline_name.removeprefix("the "))
    legend(figure, [*handles, _bound_handle(), alone])
    return figure


def _bar_handle(series: Series) -> Patch:
    return Patch(facecolor=COLOURS[series], hatch=HATCHES[series], edgecolor="white", label=series.name)


def _bars(axes: Axes, findings: Findings, series: Series, rtt_ms: float, index: int) -> None:
    num_bars = len(drafting(findings))
    width = 0.8 / num_bars
    for group, kind in enumerate(findings.kinds):
        best = findings.best(series, kind, rtt_ms, min(findings.config.workload.concurrencies))
        if best is None or best.speedup is None:
            continue
        x = group + (index - (num_bars - 1) / 2) * width
        speedup = best.speedup
        axes.bar(x, speedup.median, width * 0.92, color=COLOURS[series], hatch=HATCHES[series], edgecolor="white")
        axes.errorbar(x, speedup.median, errors([speedup]), color="black", capsize=3, linewidth=1)
        if best.bound_speedup is not None:
            axes.hlines(best.bound_speedup, x - width * 0.46, x + width * 0.46, color="black", linestyle="--")
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        label = {"ha": "center", "va": "bottom", "fontsize": 9, "bbox": plate}
        axes.text(x, speedup.median * 0.04, f"{speedup.median:.2f}", **label)  # type: ignore[arg-type]


# Tokens per second over the round trip time ---------------------------------------------------------------------------


def tokens_over_rtt(findings: Findings) -> Figure:
    """Lines: a panel per prompt kind, marks for what was measured, dashes for the bound."""
    figure, [row] = grid(1, len(findings.kinds), width=4.6, height=3.6)
    for axes, kind in zip(row, findings.kinds, strict=True):
        for series in findings.config.series:
            _over_rtt(axes, findings, series, kind)
        axes.set_title(f"{kind.replace('_', ' ')} prompts")
        axes.set_xlabel("round trip time between edge and target (ms)")
    from_zero([row])
    row[0].set_ylabel("tokens per second, one client")
    legend(figure, [*(line_handle(series) for series in findings.config.series), _bound_handle()])
    return figure


def _over_rtt(axes: Axes, findings: Findings, series: Series, kind: str) -> None:
    rtts_ms = sorted(findings.config.network.rtts_ms)
    concurrency = min(findings.config.workload.concurrencies)
    found = [findings.best(series, kind, rtt_ms, concurrency) for rtt_ms in rtts_ms]
    best = [summary for summary in found if summary is not None]
    rates = [summary.tokens_per_s for summary in best]
    style = {"color": COLOURS[series], "marker": MARKS[series], "capsize": 3}
    at_ms = [summary.cell.rtt_ms for summary in best]
    axes.errorbar(at_ms, [rate.median for rate in rates], errors(rates), **style)
    if series.endpoint is not None or not best:
        return
    end_ms = max(*rtts_ms, 1.0) if len(rtts_ms) > 1 else rtts_ms[0] + 1.0
    curve_ms = [rtts_ms[0] + (end_ms - rtts_ms[0]) * i / NUM_CURVE_POINTS for i in range(NUM_CURVE_POINTS + 1)]
    bound = [_best_bound(findings, best, rtt_ms) for rtt_ms in curve_ms]
    hollow = {"marker": MARKS[series], "markerfacecolor": "white", "markevery": [0, NUM_CURVE_POINTS]}
    axes.plot(curve_ms, bound, color=COLOURS[series], linestyle="--", linewidth=1.2, **hollow)


def _best_bound(findings: Findings, best: list[CellSummary], rtt_ms: float) -> float:
    """Tokens/s that theory allows the ways to draft that were the best ones somewhere."""
    network = findings.config.network
    rtt_s = (rtt_ms + network.jitter_ms) / 1e3
    theories = {_theory_of(findings, summary.cell) for summary in best}
    return max(
        theory.tokens_per_s(rtt_s, client_is_far=crosses_network(theory.contender.topology, network.client_site))
        for theory in theories
    )


def _theory_of(findings: Findings, cell: Cell) -> Theory:
    return findings.theories[cell.contender, cell.kind, cell.concurrency]


# Speed-up over gamma --------------------------------------------------------------------------------------------------


def speedup_over_gamma(findings: Findings) -> Figure:
    """A row per prompt kind, a column per place of the network; a line per draft, dashes for theory, a star on top."""
    columns = [(series, rtt_ms) for series in drafting(findings) for rtt_ms in _rtts_of(findings, series)]
    figure, rows = grid(len(findings.kinds), len(columns), width=3.5, height=2.9)
    for row, kind in zip(rows, findings.kinds, strict=True):
        for axes, (series, rtt_ms) in zip(row, columns, strict=True):
            _over_gamma(axes, findings, series, kind, rtt_ms)
        row[0].set_ylabel(f"{kind.replace('_', ' ')}\nspeed-up over {findings.config.baseline_name}")
    from_zero(rows)
    for axes in rows[-1]:
        axes.set_xlabel("gamma (draft tokens per round)")
    legend(figure, [*_draft_handles(findings), _theory_handle(), _star_handle()])
    return figure


def _rtts_of(findings: Findings, series: Series) -> list[float]:
    """Fused does not depend on the network but for TTFT: one column is enough."""
    rtts_ms = sorted(findings.config.network.rtts_ms)
    return rtts_ms if series.topology.is_split else rtts_ms[:1]


def _draft_handles(findings: Findings) -> list[Line2D]:
    names = [model_name(Path(draft)) for draft in findings.config.draft_models]
    styles = zip(names, DRAFT_COLOURS, DRAFT_MARKS, strict=False)
    return [Line2D([], [], color=colour, marker=mark, label=f"draft: {name}") for name, colour, mark in styles]


def _theory_handle() -> Line2D:
    return Line2D([], [], color="black", linestyle="--", label="theory")


def _star_handle() -> Line2D:
    return Line2D([], [], color="black", marker="*", markersize=11, linestyle="none", label="best measured")


def _over_gamma(axes: Axes, findings: Findings, series: Series, kind: str, rtt_ms: float) -> None:
    best = findings.best(series, kind, rtt_ms, min(findings.config.workload.concurrencies))
    for draft, colour, mark in zip(findings.config.draft_models, DRAFT_COLOURS, DRAFT_MARKS, strict=False):
        cells = [summary for summary in findings.summaries if _is_in(summary, series, kind, rtt_ms, draft)]
        known = [summary for summary in cells if summary.speedup is not None]
        concurrency = min(findings.config.workload.concurrencies)
        line = _fastest_by_gamma(summary for summary in known if summary.cell.concurrency == concurrency)
        if line:
            _gamma_line(axes, findings, line, colour, mark)
    axes.axhline(1.0, color=COLOURS[TARGET], linewidth=1.2)
    where = f"{series.name}, round trip {rtt_ms:g} ms" if series.topology.is_split else series.name
    axes.set_title(where if best is None else f"{where}\n{_setting(best)}")
    if best is not None and best.speedup is not None:
        _mark_best(axes, best, best.speedup)


def _fastest_by_gamma(summaries: Iterable[CellSummary]) -> list[CellSummary]:
    """Where several numbers of branches were measured, the best of them."""
    by_gamma: dict[int, CellSummary] = {}
    for summary in sorted(summaries, key=lambda summary: summary.tokens_per_s.median):
        by_gamma[summary.cell.contender.gamma or 0] = summary
    return [by_gamma[gamma] for gamma in sorted(by_gamma)]


def _is_in(summary: CellSummary, series: Series, kind: str, rtt_ms: float, draft: str) -> bool:
    cell = summary.cell
    place = (cell.contender.series, cell.kind, cell.rtt_ms, cell.contender.draft)
    return place == (series, kind, rtt_ms, draft)


def _gamma_line(axes: Axes, findings: Findings, line: list[CellSummary], colour: str, mark: str) -> None:
    gammas = [summary.cell.contender.gamma or 0 for summary in line]
    speedups = [summary.speedup for summary in line if summary.speedup is not None]
    style = {"color": colour, "marker": mark, "capsize": 3}
    axes.errorbar(gammas, [item.median for item in speedups], errors(speedups), **style)  # type: ignore[arg-type]
    curve = theoretical_speedups(findings, line)
    hollow = {"marker": mark, "markerfacecolor": "white", "markevery": [0, len(curve) - 1]} if curve else {}
    axes.plot(list(curve), list(curve.values()), color=colour, linestyle="--", linewidth=1.2, **hollow)  # type: ignore[arg-type]
    axes.xaxis.set_major_locator(FixedLocator(gammas))


def theoretical_speedups(findings: Findings, line: list[CellSummary]) -> dict[int, float]:
    """By gamma, from 1 to the largest measured: one acceptance, one step time, passes interpolated over width."""
    cell, network = line[0].cell, findings.config.network
    alone = findings.theories.get((Contender(Topology.TARGET), cell.kind, cell.concurrency))
    if alone is None:
        return {}
    theories = {summary.cell.contender.gamma or 0: _theory_of(findings, summary.cell) for summary in line}
    alphas = [theory.alpha for theory in theories.values() if theory.alpha is not None]
    alpha = sum(alphas) / len(alphas) if alphas else 0.0
    step_s = sum(theory.costs.step_s for theory in theories.values()) / len(theories)
    passes = {0: alone.costs.pass_s, **{gamma: theory.costs.verify_s for gamma, theory in theories.items()}}
    rtt_s = (cell.rtt_ms + network.jitter_ms) / 1e3
    base = alone.tokens_per_s(rtt_s, client_is_far=crosses_network(Topology.TARGET, network.client_site))
    far = crosses_network(cell.contender.topology, network.client_site)
    curve = {}
    for gamma in range(1, max(theories) + 1):
        costs = replace(theories[max(theories)].costs, step_s=step_s, verify_s=interpolate(passes, gamma))
        contender = replace(cell.contender, gamma=gamma)
        theory = replace(theories[max(theories)], contender=contender, alpha=alpha, costs=costs)
        curve[gamma] = theory.at_length(gamma, rtt_s, client_is_far=far) / base if base else 0.0
    return curve


def interpolate(known: dict[int, float], x: int) -> float:
    """On the straight line between the neighbours of x, which lies within what is known."""
    if x in known:
        return known[x]
    left, right = max(at for at in known if at < x), min(at for at in known if at > x)
    return known[left] + (known[right] - known[left]) * (x - left) / (right - left)


def _setting(best: CellSummary) -> str:
    contender: Contender = best.cell.contender
    speedup = "" if best.speedup is None else f": {best.speedup.median:.2f}"
    return f"best: {contender.draft_name}, gamma {contender.gamma}{speedup}"


def _mark_best(axes: Axes, best: CellSummary, speedup: Spread) -> None:
    star = {"marker": "*", "markersize": 15, "color": "black", "markeredgecolor": "white", "zorder": 5}
    axes.plot(best.cell.contender.gamma or 0, speedup.median, linestyle="none", **star)  # type: ignore[arg-type]


# Tokens per second over concurrency -----------------------------------------------------------------------------------


def tokens_over_concurrency(findings: Findings) -> Figure:
    """A row per prompt kind, a column per round trip time, a line per topology."""
    rtts_ms = sorted(findings.config.network.rtts_ms)
    figure, rows = grid(len(findings.kinds), len(rtts_ms), width=3.5, height=2.9)
    for row, kind in zip(rows, findings.kinds, strict=True):
        for axes, rtt_ms in zip(row, rtts_ms, strict=True):
            for series in findings.config.series:
                _over_concurrency(axes, findings, series, kind, rtt_ms)
            axes.set_title(f"round trip {rtt_ms:g} ms")
        row[0].set_ylabel(f"{kind.replace('_', ' ')}\ntokens per second, all clients")
    from_zero(rows)
    for axes in rows[-1]:
        axes.set_xlabel("requests in flight")
    legend(figure, [line_handle(series) for series in findings.config.series])
    return figure


def _over_concurrency(axes: Axes, findings: Findings, series: Series, kind: str, rtt_ms: float) -> None:
    concurrencies = sorted(findings.config.workload.concurrencies)
    found = [findings.best(series, kind, rtt_ms, concurrency) for concurrency in concurrencies]
    best = [summary for summary in found if summary is not None]
    rates, at = [summary.tokens_per_s for summary in best], [summary.cell.concurrency for summary in best]
    style = {"color": COLOURS[series], "marker": MARKS[series], "capsize": 3}
    axes.errorbar(at, [rate.median for rate in rates], errors(rates), **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(concurrencies))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
