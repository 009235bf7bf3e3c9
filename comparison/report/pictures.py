"""Which pictures a report has, what each is called, and what it shows in words, for those who do not see it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from comparison.plan.config import Contender, Load
from comparison.report import curves, plots
from comparison.report.findings import Findings
from comparison.report.looks import STYLE, save
from comparison.report.summary import CellSummary, Spread


@dataclass(frozen=True, slots=True)
class Picture:
    """One kind of picture.

    Attributes:
        finding: its sentences; none where there is nothing to draw.
    """

    name: str
    title: str
    draw: Callable[[Findings], Figure]
    finding: Callable[[Findings], list[str]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture in a file."""

    file: Path
    title: str
    finding: str


def draw_all(findings: Findings, directory: Path) -> list[Drawn]:
    """Draw every picture that the findings have data for."""
    drawn = []
    with mpl.rc_context(STYLE):
        for picture in PICTURES:
            if sentences := picture.finding(findings):
                file = directory / f"{picture.name}.png"
                save(picture.draw(findings), file, findings.config)
                drawn.append(Drawn(file, picture.title, f"{'; '.join(sentences)}."))
    return drawn


def speedups(findings: Findings) -> list[str]:
    """A sentence per topology and prompt kind: from the best network to the worst."""
    return [
        f"{_name(kind, series)}: {', '.join(_speedup(findings, it, it.speedup) for it in best if it.speedup)}"
        for kind, series, best in _over_rtt(findings)
        if series != findings.config.baseline.series and all(summary.speedup for summary in best)
    ]


def _name(kind: str, series: Contender) -> str:
    return f"{kind.replace('_', ' ')}, {series.name}"


def _speedup(findings: Findings, summary: CellSummary, speedup: Spread) -> str:
    contender = summary.cell.contender
    setting = f" with {contender.draft_name}, gamma {contender.gamma}" if findings.config.sweeps else ""
    ratio = (service := findings.at(summary.cell)) and findings.over_target(service, "end_to_end_latency_s")
    doubt = f" ({ratio.doubt})" if ratio and ratio.doubt else ""
    return f"{speedup.median:.2f} times{_at(findings, summary)}{setting}{doubt}"


def _at(findings: Findings, summary: CellSummary) -> str:
    """At which round trip, where anybody set one."""
    return f" at {summary.cell.rtt_ms:g} ms" if findings.config.topologies else ""


def _over_rtt(findings: Findings, load: Load | None = None) -> Iterator[tuple[str, Contender, list[CellSummary]]]:
    for kind, series in itertools.product(findings.kinds, findings.config.series):
        if best := findings.bests(series, kind, load=load):
            yield kind, series, best


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


def _knees(findings: Findings) -> list[str]:
    return [
        f"{_name(kind, curve.series)}: {_knee(curve, is_open=is_open)}"
        for is_open in curves.loads_to_draw(findings)
        for kind in findings.kinds
        for curve in curves.load_curves(findings, kind, is_open=is_open)
    ]


def _knee(curve: curves.LoadCurve, *, is_open: bool) -> str:
    unit = "requests per second" if is_open else "in flight"
    if curve.knee is None:
        return f"no knee up to {max(curve.loads):g} {unit}"
    return f"latency rises steeply from {curve.knee:g} {unit}"


def _speedups_of_sweep(findings: Findings) -> list[str]:
    return speedups(findings) if findings.config.sweeps else []


PICTURES = (
    Picture("speedup_by_kind", "Speed-up by prompt kind and topology", plots.speedup_by_kind, speedups),
    Picture("tokens_over_rtt", "Tokens per second", plots.tokens_over_rtt, _rates),
    Picture("speedup_over_gamma", "Speed-up over gamma, with the bound", plots.speedup_over_gamma, _speedups_of_sweep),
    Picture("tokens_over_concurrency", "Tokens/s of all clients", plots.tokens_over_concurrency, _rates_of_many),
    Picture("latency_shares", "Share of requests that were served so fast", curves.latency_shares, _shares),
    Picture("latency_over_load", "Latency over the load, and its knee", curves.latency_over_load, _knees),
)
