"""Tables of figures: columns, tables for the terminal, and Markdown tables with a column for each load."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from specdec.comparison.plan.config import ComparisonConfig, Topology
from specdec.comparison.plan.grid import Cell
from specdec.comparison.report.findings import Findings, emulation_of
from specdec.comparison.report.markdown import markdown
from specdec.comparison.report.service import describe
from specdec.comparison.report.summary import CellSummary
from specdec.inference.request import Schedule

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT]):
    """Column of a table: a figure, or a value that says which measurement a row is about.

    Attributes:
        name: heading with the unit, in one line or two.
        text: function that returns the column's text for a row.
        is_text: whether the column is aligned to the left; figures are aligned to the right.
    """

    name: str
    text: Callable[[RowT], str]
    is_text: bool = False


def place_columns(config: ComparisonConfig) -> list[Column[Cell]]:
    """Return the columns that tell a comparison's measurements apart: the way to serve and the conditions."""
    columns: list[Column[Cell]] = [Column("topology", lambda cell: cell.contender.name, is_text=True)]
    if config.sweeps:
        columns.append(Column("draft", lambda cell: cell.contender.draft_name, is_text=True))
        columns.append(Column("gamma", lambda cell: _figure(cell.contender.gamma, digits=0)))
        columns.append(Column("branches", lambda cell: _figure(cell.contender.branches, digits=0)))
    if config.topologies:
        columns.append(Column("RTT\nms", lambda cell: f"{cell.rtt_ms:g}"))
    if len(config.workload.loads) > 1:
        columns.append(Column("clients", lambda cell: _figure(cell.concurrency or None, digits=0)))
        columns.append(Column("requests\n/s", lambda cell: _figure(cell.request_rate, digits=2)))
    return columns


def texts(columns: Sequence[Column[RowT]], row: RowT) -> list[str]:
    return [column.text(row) for column in columns]


def _figure(value: float | None, *, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


FIGURES: tuple[Column[CellSummary], ...] = (
    Column("tokens\n/s", lambda it: f"{it.tokens_per_s.median:.1f}"),
    Column("TTFT\nms", lambda it: _figure(it.ttft_s, scale=1e3, digits=0)),
    Column("TPOT\nms", lambda it: _figure(it.tpot_s, scale=1e3, digits=1)),
    Column("end to\nend ms", lambda it: _figure(it.end_to_end_s, scale=1e3, digits=0)),
    Column("acceptance\nrate", lambda it: _figure(it.acceptance_rate, digits=2)),
    Column("drafting\non %", lambda it: _figure(it.drafting_share, scale=1e2, digits=0)),
    Column("tokens\n/pass", lambda it: _figure(it.mean_acceptance_length, digits=2)),
    Column("speed-up", lambda it: f"{it.speedup.median:.2f}" if it.speedup else "-"),
    Column("min-max", lambda it: f"{it.speedup.low:.2f}-{it.speedup.high:.2f}" if it.speedup else "-"),
    Column("bound\ntokens/s", lambda it: _figure(it.bound_tokens_per_s or None, digits=1)),
    Column("% of\nbound", lambda it: _figure(it.percent_of_bound or None, digits=0)),
    Column("client\nCPU %", lambda it: _figure(it.client_share, scale=1e2, digits=0)),
)


def print_tables(console: Console, findings: Findings) -> None:
    """Print a table per prompt kind, then warnings, and whether all answers have the expected tokens."""
    place = place_columns(findings.config)
    for kind in findings.kinds:
        title = ", ".join(filter(None, (f"{kind} prompts", emulation_of(findings.config))))
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
        for name, is_text in [(it.name, it.is_text) for it in place] + [(it.name, False) for it in FIGURES]:
            table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
        for summary in findings.summaries:
            if summary.cell.kind == kind:
                table.add_row(*texts(place, summary.cell), *texts(FIGURES, summary))
        console.print(table)
    for warning in findings.warnings:
        console.print(warning, style="yellow")
    console.print(str(findings.agreement), style="green" if findings.agreement.holds else "bold red")


WIDTH = 120
LEAST = 0.97
"""Share of the target's speed that serving with a draft must reach, if the draft has a CPU core of its own."""


def load_table(findings: Findings) -> str:
    """Return conditions and tables in Markdown, and a sentence on how many speed-ups are at least `LEAST`."""
    conditions = dict(findings.conditions)
    head = [f"{conditions[name].removesuffix('.')}." for name in ("Prompts", "Machines", "Host", "Host load")]
    label = emulation_of(findings.config)
    text = " ".join([*([f"{label}."] if label else []), *head, *findings.warnings])
    tables = [
        _by_load(findings, "over the target alone", _over_target),
        _by_load(findings, "TTFT, gaps p99, ms", lambda summary: _slowest(findings, summary)),
    ]
    return "\n\n".join([textwrap.fill(text, WIDTH, break_on_hyphens=False), *tables, verdict(findings)]) + "\n"


def verdict(findings: Findings) -> str:
    """Return a sentence with the number of median speed-ups that are at least `LEAST`, and the lowest if some are not.

    Synchronous rounds, which wait for the network, are not counted.
    """
    asked = [it for it in findings.summaries if it.cell.contender.topology is not Topology.TARGET]
    medians = {it.cell: it.speedup.median for it in asked if it.speedup and it.cell.contender.schedule != Schedule.SYNC}
    enough = sum(median >= LEAST for median in medians.values())
    text = f"Without rounds (sync), {enough} of {len(medians)} medians are at least {LEAST} of the target"
    if enough < len(medians):
        cell = min(medians, key=medians.__getitem__)
        text += f"; the lowest is {medians[cell]:.2f} ({cell.contender.name}, {cell.kind}, {cell.load})"
    return textwrap.fill(f"{text}.", WIDTH, break_on_hyphens=False)


def _by_load(findings: Findings, figure: str, text_of: Callable[[CellSummary], str]) -> str:
    """Return a Markdown table with a row for each way to serve, prompt kind and RTT, and a column for each load.

    Args:
        figure: heading of the first column, which says what the table shows.
        text_of: function that returns the text for one measurement.
    """
    rows: dict[tuple[str, str, float], dict[str, str]] = {}
    for it in findings.summaries:
        rows.setdefault((it.cell.contender.label, it.cell.kind, it.cell.rtt_ms), {})[it.cell.load] = text_of(it)
    names = {it.cell.contender.label: it.cell.contender.name for it in findings.summaries}
    loads = list(dict.fromkeys(it.cell.load for it in findings.summaries))
    body = [[names[label], kind, *(cells.get(load, "-") for load in loads)] for (label, kind, _), cells in rows.items()]
    return markdown([figure, "prompts", *loads], body)


def _over_target(summary: CellSummary) -> str:
    """Return a measurement's speed-up with the range of its runs; for the target alone, its tokens per second."""
    if summary.speedup is None or summary.cell.contender.topology is Topology.TARGET:
        return f"{summary.tokens_per_s.median:.0f} tokens/s"
    return f"{summary.speedup.median:.2f} ({summary.speedup.low:.2f}-{summary.speedup.high:.2f})"


def _slowest(findings: Findings, summary: CellSummary) -> str:
    """Return the 99th percentiles of the time to first token and of the gaps between messages, as text."""
    service = findings.at(summary.cell)
    values = service.values if service else {}
    times = (describe(values.get(name, ())).get("p99") for name in ("ttft_s", "message_gap_s"))
    return ", ".join("-" if seconds is None else f"{seconds * 1e3:.0f}" for seconds in times)
