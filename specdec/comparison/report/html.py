"""Content of report.html. Its layout, and all HTML, is in page.html."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from specdec.comparison.plan.config import ALONE, ComparisonConfig, Contender
from specdec.comparison.plan.roles import MARGIN, TIE, commands
from specdec.comparison.report.findings import Findings, emulation_of, short_conditions
from specdec.comparison.report.plots import Drawn, speedups
from specdec.comparison.report.service import LATENCIES, QUANTILES, Service
from specdec.comparison.report.table import FIGURES, place_columns, texts

MAX_DIFFERENCES = 50
"""Differences that the page shows; results.json has all."""
STATISTICS = (*(f"p{quantile}" for quantile in QUANTILES), "mean", "min", "max", "stddev")
Block: TypeAlias = tuple[str, Any]
"""Pair of the name of a macro in page.html, and the argument with which to call the macro."""


@dataclass(frozen=True, slots=True)
class Header:
    """Head of a page.

    Attributes:
        verdicts: sentences on the result, each with True if it is bad news, else False.
        remarks: warnings and differences below the verdicts.
    """

    title: str
    verdicts: Sequence[tuple[str, bool]]
    lead: str = ""
    remarks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Table of texts; the first column names the row.

    Attributes:
        summary: text that is shown while the table is folded.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    summary: str = ""


def page(header: Header, parts: Mapping[str, Sequence[Block]], config: ComparisonConfig) -> str:
    """Return the text of a whole HTML page; all texts in it are escaped.

    Args:
        parts: blocks of each section, by the heading of the section.
        config: comparison whose conditions the page names at its end.
    """
    return template().render(header=header, parts=parts, conditions=short_conditions(config))


def template() -> Template:
    """Return the Jinja template of all HTML pages, page.html, which escapes texts."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")


def render(findings: Findings, pictures: Sequence[Drawn]) -> str:
    """Return the HTML page that reports a comparison, with its pictures."""
    parts: dict[str, Sequence[Block]] = {
        "In short": [("listed", [*speedups(findings), *_to_run(findings)])],
        "Pictures": [("figure", picture) for picture in pictures],
        **{f"{_title(kind)} prompts": _results(findings, kind) for kind in findings.kinds},
        "Conditions": [("named", findings.conditions)],
        "How to read it": [("explained", bool(findings.config.topologies))],
    }
    return page(_header(findings), parts, findings.config)


def _to_run(findings: Findings) -> list[str]:
    """Return sentences that advise how to serve, each with the round trip times at which this is the best way.

    Empty if the target alone was not measured, with which all ways are compared. On a busy machine, the only sentence
    is that the figures give no advice.
    """
    config = findings.config
    if not config.topologies or ALONE not in config.contenders:
        return []
    if findings.busy:
        return ["What to run: these figures cannot say, since the machine was busy or unsteady"]
    places: dict[Contender | None, list[str]] = {}
    for rtt_ms in sorted(config.network.rtts_ms):
        best, gain = _best_at(findings, rtt_ms)
        places.setdefault(best, []).append(f"{rtt_ms:g} ms ({gain:.2f} times)" if best else f"{rtt_ms:g} ms")
    return [_run_sentence(findings, best, at) for best, at in places.items()]


def _best_at(findings: Findings, rtt_ms: float) -> tuple[Contender | None, float]:
    """Return the way to serve that is advised at a round trip time and the lowest load, and its speed-up.

    The speed-up is the geometric mean over the prompt kinds. The way is the simplest one whose speed-up is at least
    `TIE` times the largest.

    Returns:
        The way and its speed-up, or (None, 1.0) for the target alone: if no speed-up reaches `MARGIN`, or if no way
        differs from the target alone beyond doubt for any prompt kind.
    """
    gains: dict[Contender, list[float]] = defaultdict(list)
    certain = set()
    for summary in findings.summaries:
        cell = summary.cell
        if (
            cell.rtt_ms == rtt_ms
            and cell.concurrency == min(findings.config.workload.concurrencies)
            and summary.speedup
        ):
            gains[cell.contender].append(summary.speedup.median)
            service = findings.at(cell)
            ratio = service and findings.over_target(service, "end_to_end_latency_s")
            certain |= {cell.contender} if ratio and not ratio.doubt else set()
    means = {each: statistics.geometric_mean(gains[each]) for each in findings.config.contenders if each in certain}
    most = max(means.values(), default=0.0)
    simplest = next((each for each, mean in means.items() if mean >= TIE * most and most >= MARGIN), None)
    return simplest, means.get(simplest, 1.0) if simplest else 1.0


def _run_sentence(findings: Findings, best: Contender | None, places: Sequence[str]) -> str:
    name = "the target alone" if best is None else best.label
    lines = "; and ".join(commands(findings.config, best))
    return f"What to run at round trips of {', '.join(places)}: {name}. {lines}"


_TOPOLOGIES = "Target alone, both models in one server (fused), draft and target on two machines (distributed)"


def _header(findings: Findings) -> Header:
    agreement, label = findings.agreement, emulation_of(findings.config)
    emulated = f"{label}. No figure here is this machine's." if label else ""
    doubts = [(text, True) for text in (emulated, findings.busy) if text]
    compared = _TOPOLOGIES if findings.config.topologies else "Servers that were running already"
    return Header(
        "Comparison of architectures",
        [*doubts, (str(agreement), not agreement.holds)],
        f"{compared}: speed at equal tokens. Measured in {findings.duration_s:.0f} s.",
        [
            *map(str, (agreement.differences + agreement.near_ties)[:MAX_DIFFERENCES]),
            *(it for it in findings.warnings if it != findings.busy),
        ],
    )


def _title(kind: str) -> str:
    return kind.replace("_", " ").capitalize()


def _results(findings: Findings, kind: str) -> list[Block]:
    summaries = [summary for summary in findings.summaries if summary.cell.kind == kind]
    services = [service for service in findings.services if service.cell.kind == kind]
    place, kind_of, label = place_columns(findings.config), f"{_title(kind)} prompts", emulation_of(findings.config)
    over = f"requests, and times over those of {findings.config.baseline_name}"
    names = [column.name for column in place]
    speed = [[*texts(place, summary.cell), *texts(FIGURES, summary)] for summary in summaries]
    served = [[*texts(place, service.cell), *_served(findings, service)] for service in services]
    figures = [[*texts(place, service.cell), *row] for service in services for row in _figures(service)]
    folded = f"{kind_of}: every figure's distribution"
    return [
        *([("label", label)] if label else []),
        ("table", Table(f"{kind_of}: speed", [*names, *(column.name for column in FIGURES)], speed)),
        ("table", Table(f"{kind_of}: {over}", [*names, *_SERVED], served)),
        ("folded", Table(f"{kind_of}: distributions", [*names, "figure", *STATISTICS], figures, folded)),
    ]


_SERVED = ("answered", "errors", "per minute", "goodput", "TTFT, 95 %", "ITL, 95 %", "end to end, 95 %")


def _served(findings: Findings, service: Service) -> list[str]:
    errors = ", ".join(f"{code}: {count}" for code, count in service.errors.items())
    found = service.statistics()
    ratios = [findings.over_target(service, name) for name in LATENCIES]
    totals = f"{found['num_completed_requests_per_min']:.0f}", f"{found['goodput_share']:.0%}"
    over = ["-" if ratio is None else str(ratio) for ratio in ratios]
    return [f"{service.num_answered} of {len(service.requests)}", errors or "none", *totals, *over]


def _figures(service: Service) -> list[list[str]]:
    """Return a table row for each figure, with its name and statistics; times are in milliseconds."""
    rows = []
    for name, values in service.statistics().items():
        if isinstance(values, dict) and "p50" in values:
            is_time = name in (*LATENCIES, "message_gap_s")
            scale, text = (1e3, f"{name.removesuffix('_s')}_ms") if is_time else (1.0, name)
            rows.append([text, *(f"{values[statistic] * scale:.4g}" for statistic in STATISTICS)])
    return rows
