"""The figures as texts in columns, and as a table on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from inference.comparison.plan.config import ComparisonConfig
from inference.comparison.plan.grid import Cell
from inference.comparison.report.findings import Findings, emulation_of
from inference.comparison.report.summary import CellSummary, Spread


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a cell.

    Attributes:
        name: heading, with the unit; may have two lines.
        text: of the figure.
        is_text: stands on the left.
    """

    name: str
    text: Callable[[CellSummary], str]
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class PlaceColumn:
    """What tells a cell from others, as a text."""

    name: str
    text: Callable[[Cell], str]
    is_text: bool = False

    def of_summary(self) -> Column:
        """The same in a table of figures."""
        return Column(self.name, lambda it: self.text(it.cell), self.is_text)


def columns(config: ComparisonConfig) -> list[Column]:
    """What differs between the cells of this comparison, and all figures."""
    return [*(column.of_summary() for column in place_columns(config)), *_FIGURES]


def place_columns(config: ComparisonConfig) -> list[PlaceColumn]:
    """What differs between the cells of this comparison."""
    contender = [PlaceColumn("topology", lambda cell: cell.contender.series.name, is_text=True)]
    if config.sweeps:
        contender.append(PlaceColumn("draft", lambda cell: cell.contender.draft_name, is_text=True))
        contender.append(PlaceColumn("gamma", lambda cell: _figure(cell.contender.gamma, digits=0)))
        contender.append(PlaceColumn("branches", lambda cell: _figure(cell.contender.branches, digits=0)))
    place = [PlaceColumn("RTT\nms", lambda cell: f"{cell.rtt_ms:g}")]
    if len(config.workload.loads) > 1:
        place.append(PlaceColumn("clients", lambda cell: _figure(cell.concurrency or None, digits=0)))
        place.append(PlaceColumn("requests\n/s", lambda cell: _figure(cell.request_rate, digits=2)))
    return [*contender, *place]


def _figure(value: float | None, *, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def _ratio(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f}"


def _range(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.low:.2f}-{spread.high:.2f}"


_FIGURES = (
    Column("tokens\n/s", lambda it: f"{it.tokens_per_s.median:.1f}"),
    Column("TTFT\nms", lambda it: _figure(it.ttft_s, scale=1e3, digits=0)),
    Column("TPOT\nms", lambda it: _figure(it.tpot_s, scale=1e3, digits=1)),
    Column("end to\nend ms", lambda it: _figure(it.end_to_end_s, scale=1e3, digits=0)),
    Column("acceptance\nrate", lambda it: _figure(it.acceptance_rate, digits=2)),
    Column("tokens\n/pass", lambda it: _figure(it.mean_acceptance_length, digits=2)),
    Column("speed-up", lambda it: _ratio(it.speedup)),
    Column("min-max", lambda it: _range(it.speedup)),
    Column("bound\ntokens/s", lambda it: _figure(it.bound_tokens_per_s or None, digits=1)),
    Column("% of\nbound", lambda it: _figure(it.percent_of_bound or None, digits=0)),
)


def print_tables(console: Console, findings: Findings) -> None:
    """One table per prompt kind, then the verdict on the tokens."""
    shown = columns(findings.config)
    for kind in findings.kinds:
        title = ", ".join(filter(None, (f"{kind} prompts", emulation_of(findings.config))))
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
        for column in shown:
            table.add_column(column.name, justify="left" if column.is_text else "right", no_wrap=True)
        for summary in findings.summaries:
            if summary.cell.kind == kind:
                table.add_row(*(column.text(summary) for column in shown))
        console.print(table)
    for warning in findings.warnings:
        console.print(warning, style="yellow")
    console.print(str(findings.agreement), style="green" if findings.agreement.holds else "bold red")
