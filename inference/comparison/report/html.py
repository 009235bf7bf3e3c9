"""report.html: one file with everything in it, pictures included, that asks nothing of any network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from inference.comparison.plan.config import Series
from inference.comparison.report.findings import Findings, conditions, emulation_of
from inference.comparison.report.plots import title_of
from inference.comparison.report.summary import CellSummary
from inference.comparison.report.table import Column, columns

MAX_DIFFERENCES = 50
"""Shown in the page; results.json has all of them."""

_CSS = """
:root { color-scheme: light; --line: #d8dce2; --soft: #f5f6f8; --ink: #1b1f24; --dim: #5b6470; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink);
       background: #fff; max-width: 1120px; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
p.lead { color: var(--dim); margin: 0 0 1.2rem; }
.verdict { padding: .7rem 1rem; border-left: 4px solid #009E73; background: var(--soft); font-weight: 600; }
.verdict.bad { border-color: #D55E00; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
th, td { padding: .32rem .55rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--dim); font-weight: 600; white-space: normal; vertical-align: bottom; }
.text { text-align: left; }
tr.first td { border-top: 2px solid var(--line); }
table.plain th, table.plain td { text-align: left; white-space: normal; vertical-align: top; }
table.plain th { width: 9rem; }
figure { margin: 1.2rem 0 2rem; } figure img { max-width: 100%; height: auto; }
figcaption { font-weight: 600; margin-bottom: .4rem; }
code { background: var(--soft); padding: 0 .25em; }
"""


def render(findings: Findings, pictures: Sequence[Path]) -> str:
    """The page."""
    body = [
        "<h1>Comparison of architectures</h1>",
        '<p class="lead">Target alone, both models in one server (fused), draft and target on two machines '
        f"(distributed): speed at equal tokens. Measured in {findings.duration_s:.0f} s.</p>",
        _emulated(findings),
        _verdict(findings),
        "<h2>In short</h2>",
        _list(headlines(findings)),
        *[picture(file, title_of(file)) for file in pictures],
        *[_results(findings, kind) for kind in findings.kinds],
        "<h2>Conditions</h2>",
        _conditions(findings),
        "<h2>How to read it</h2>",
        _list(_EXPLANATIONS),
    ]
    return page("Comparison of architectures", body)


def page(title: str, body: Sequence[str]) -> str:
    """One file for any browser, that asks nothing of any network."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n"
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


_EXPLANATIONS = (
    "<b>tokens/s</b>: output tokens / time from sending to the last token, prompt included; median over the runs. "
    "With several clients: tokens of all / time from the first sent to the last answered.",
    "<b>TTFT</b>: request sent to first token. <b>TPOT</b>: (end-to-end - TTFT) / (output tokens - 1). Medians.",
    "<b>acceptance rate</b>: accepted / verified draft tokens. <b>tokens/pass</b>: mean acceptance length, the "
    "committed tokens per target pass that verified a proposal.",
    "<b>speed-up</b>: over the target alone (of endpoints alone: over the first) in the same "
    "run, same prompts, same network; median, and the lowest and "
    "highest of the runs.",
    "<b>bound</b>: what synchronous rounds allow in theory (Leviathan et al., arXiv 2211.17192) with the draft step "
    "time, target pass times and acceptance measured here and the round trip time set: (1 - &alpha;<sup>&gamma;+1"
    "</sup>) / (1 - &alpha;) tokens in &gamma; steps + round trip (distributed only) + one pass. &alpha; is the "
    "probability that a draft token is accepted, given that all before it in its round were. It assumes "
    "that draft tokens are accepted independently; where they are not, a few per cent more are possible. A draft that "
    "runs ahead (async, pool) is allowed more: draft and network hidden behind passes, until it is surprised, once in "
    "1 / (1 - &alpha;) tokens. No new proposal can arrive for a round trip then, unless a branch had foreseen it; the "
    "target decodes or looks up by itself. The best length up to &gamma; counts, and the session's first round trip. "
    "ngram often proposes fewer than &gamma; tokens; the bound counts full rounds.",
    "A proxy on loopback stands for the network. It is in every path in every cell, also at round trip 0, so that all "
    "topologies pay for it alike; client and proxy need a little of the same cores.",
)


def headlines(findings: Findings) -> list[str]:
    """A sentence per topology and prompt kind: from the best network to the worst."""
    sentences = []
    concurrency = min(findings.config.workload.concurrencies)
    rtts_ms = sorted(findings.config.network.rtts_ms)
    for kind in findings.kinds:
        for series in findings.config.series:
            found = [findings.best(series, kind, rtt_ms, concurrency) for rtt_ms in rtts_ms]
            best = [summary for summary in found if summary is not None and summary.speedup is not None]
            if best and series != findings.config.baseline.series:
                sentences.append(_headline(kind, series, best, with_setting=findings.config.sweeps))
    return sentences


def _headline(kind: str, series: Series, best: Sequence[CellSummary], *, with_setting: bool) -> str:
    parts = ", ".join(_at_rtt(summary, with_setting=with_setting) for summary in best)
    return f"<b>{escape(kind.replace('_', ' '))}, {series.name}</b>: {parts}"


def _at_rtt(summary: CellSummary, *, with_setting: bool) -> str:
    speedup = summary.speedup
    if speedup is None:
        raise ValueError("a headline needs a speed-up")
    contender = summary.cell.contender
    setting = f" with {escape(contender.draft_name)}, gamma {contender.gamma}" if with_setting else ""
    return f"{speedup.median:.2f}&times; at {summary.cell.rtt_ms:g} ms{setting}"


def _verdict(findings: Findings) -> str:
    agreement = findings.agreement
    mood = "verdict" if agreement.holds else "verdict bad"
    shown = [escape(str(difference)) for difference in agreement.differences[:MAX_DIFFERENCES]]
    shown += map(escape, findings.warnings)
    return f'<p class="{mood}">{escape(str(agreement))}</p>{_list(shown) if shown else ""}'


def _emulated(findings: Findings) -> str:
    label = emulation_of(findings.config)
    return f'<p class="verdict bad">{escape(label)}. No figure here is this machine\'s.</p>' if label else ""


def _list(items: Sequence[str]) -> str:
    """Items are HTML already."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def picture(file: Path, title: str) -> str:
    """A PNG file as a figure."""
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    title = escape(title)
    image = f'<img alt="{title}" src="data:image/png;base64,{data}">'
    return f"<figure><figcaption>{title}</figcaption>{image}</figure>"


def _results(findings: Findings, kind: str) -> str:
    shown = columns(findings.config)
    head = "".join(f"<th{_side(column)}>{escape(column.name).replace(chr(10), ' ')}</th>" for column in shown)
    rows, before = [], None
    for summary in findings.summaries:
        if summary.cell.kind != kind:
            continue
        place = summary.cell.rtt_ms, summary.cell.concurrency
        cells = "".join(f"<td{_side(column)}>{escape(column.text(summary))}</td>" for column in shown)
        rows.append(f"<tr{' class=first' if before not in (None, place) else ''}>{cells}</tr>")
        before = place
    label = emulation_of(findings.config)
    title = f"<h2>{escape(kind.replace('_', ' ').capitalize())} prompts</h2>{escape(label)}"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'{title}<div class="scroll">{table}</div>'


def _side(column: Column) -> str:
    return " class=text" if column.is_text else ""


def _conditions(findings: Findings) -> str:
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in conditions(findings.config))
    return f'<table class="plain"><tbody>{"".join(rows)}</tbody></table>'
