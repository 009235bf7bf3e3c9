"""Table of load: how every contender serves few streams and many, in Markdown."""

from __future__ import annotations

import textwrap

from comparison.plan.config import Topology
from comparison.report.distribution import describe
from comparison.report.findings import Findings, emulation_of
from comparison.report.markdown import markdown
from comparison.report.summary import CellSummary
from inference.request import Schedule

HEADER = (
    *("served by", "prompts", "streams", "tokens/s", "over the target alone", "runs", "TTFT p50, ms", "TTFT p99, ms"),
    *("gaps p99, ms", "client CPU %"),
)
WIDTH = 120
LEAST = 0.97
"""Share of the target's speed that a draft with a core of its own keeps at least."""


def load_table(findings: Findings) -> str:
    """Return conditions, table, and the cells below `LEAST` of the target's speed."""
    conditions = dict(findings.conditions)
    head = [f"{conditions[name].removesuffix('.')}." for name in ("Prompts", "Machines", "Host", "Host load")]
    label = emulation_of(findings.config)
    text = " ".join([*([f"{label}."] if label else []), *head, *findings.warnings])
    rows = [_row(findings, summary) for summary in findings.summaries]
    parts = [textwrap.fill(text, WIDTH, break_on_hyphens=False), markdown(HEADER, rows), verdict(findings)]
    return "\n\n".join(parts) + "\n"


def verdict(findings: Findings) -> str:
    """Return where contenders are slower than the target alone; rounds, which wait for the network, are not counted."""
    asked = [it for it in findings.summaries if it.speedup and it.cell.contender.topology is not Topology.TARGET]
    asked = [it for it in asked if it.cell.contender.schedule is not Schedule.SYNC]
    slow = [it for it in asked if it.speedup and it.speedup.median < LEAST]
    text = f"Without rounds (sync), {len(asked) - len(slow)} of {len(asked)} medians are at least {LEAST} of the target"
    where = (
        f"{it.cell.contender.name}, {it.cell.kind}, {it.cell.load}: {it.speedup.median:.2f}"
        for it in slow
        if it.speedup
    )
    return textwrap.fill(f"{text}{'; below it: ' + '; '.join(where) if slow else ''}.", WIDTH, break_on_hyphens=False)


def _row(findings: Findings, summary: CellSummary) -> list[str]:
    cell, speedup, service = summary.cell, summary.speedup, findings.at(summary.cell)
    values = service.values if service else {}
    ttft, gaps = (describe(values.get(name, ())) for name in ("ttft_s", "message_gap_s"))
    times = (ttft.get("p50"), ttft.get("p99"), gaps.get("p99"))
    return [
        *(cell.contender.name, cell.kind, str(cell.concurrency), f"{summary.tokens_per_s.median:.0f}"),
        *((f"{speedup.median:.2f}", f"{speedup.low:.2f}-{speedup.high:.2f}") if speedup else ("-", "-")),
        *("-" if seconds is None else f"{seconds * 1e3:.0f}" for seconds in times),
        f"{summary.client_share:.0%}",
    ]
