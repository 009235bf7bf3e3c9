"""report.html: one file with everything in it, pictures included, that asks nothing of any network.

Made for readers without a mouse or without sight, too: landmarks, headings in order, captions and scopes of tables,
pictures whose text says what they show, a visible focus, no colour that means something by itself.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from comparison.plan.config import ComparisonConfig
from comparison.report.distribution import QUANTILES
from comparison.report.findings import Findings, emulation_of, short_conditions
from comparison.report.pictures import Drawn, speedups
from comparison.report.service import LATENCIES, Service
from comparison.report.table import FIGURES, place_columns, texts

MAX_DIFFERENCES = 50
"""Shown in the page; results.json has all of them."""
TITLE = "Comparison of architectures"
STATISTICS = (*(f"p{quantile}" for quantile in QUANTILES), "mean", "min", "max", "stddev")

_CSS = """
:root { color-scheme: light; --line: #d8dce2; --soft: #f5f6f8; --ink: #1b1f24; --dim: #4d5560; --link: #0b57a4; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink);
       background: #fff; max-width: 1120px; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
a { color: var(--link); } nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; }
a.skip { position: absolute; left: -999rem; } a.skip:focus { position: static; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
p.lead, .small { color: var(--dim); } .small { font-size: 13px; }
.verdict { padding: .7rem 1rem; border-left: 4px solid #007a59; background: var(--soft); font-weight: 600; }
.verdict.bad { border: 2px solid #a33c00; border-left-width: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
.scroll { overflow-x: auto; }
th, td { padding: .32rem .55rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { color: var(--dim); white-space: normal; vertical-align: bottom; }
tbody th, .text { text-align: left; font-weight: 400; }
tbody tr:nth-child(even) { background: var(--soft); }
summary { cursor: pointer; font-weight: 600; margin: .6rem 0; }
figure { margin: 1.2rem 0 2rem; } figure img { max-width: 100%; height: auto; }
figcaption h3 { margin: 0; }
code { background: var(--soft); padding: 0 .25em; }
"""


_TOPOLOGIES = "Target alone, both models in one server (fused), draft and target on two machines (distributed)"


def render(findings: Findings, pictures: Sequence[Drawn]) -> str:
    """The page."""
    parts = {
        "In short": listed([escape(sentence) for sentence in speedups(findings)]),
        "Pictures": "".join(figure(picture, findings.config) for picture in pictures),
        **{f"{_title(kind)} prompts": _results(findings, kind) for kind in findings.kinds},
        "Conditions": told(findings.conditions),
        "How to read it": listed(_EXPLANATIONS if findings.config.topologies else _EXPLANATIONS[:-2]),
    }
    compared = _TOPOLOGIES if findings.config.topologies else "Servers that were running already"
    lead = f'<p class="lead">{compared}: speed at equal tokens. Measured in {findings.duration_s:.0f} s.</p>\n'
    return page(TITLE, f"{lead}{_emulated(findings)}{_verdict(findings)}", parts)


def page(title: str, header: str, parts: Mapping[str, str]) -> str:
    """One file for any browser, keyboard and screen reader, that asks nothing of any network; all is HTML already."""
    links = [f'<a href="#part{index}">{escape(name)}</a>' for index, name in enumerate(parts)]
    sections = [
        f'<section aria-labelledby="part{index}"><h2 id="part{index}">{escape(name)}</h2>\n{content}</section>'
        for index, (name, content) in enumerate(parts.items())
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_CSS}</style></head>\n"
        f'<body>\n<a class="skip" href="#main">Skip to the results</a>\n<header><h1>{title}</h1>\n{header}</header>\n'
        f'<nav aria-label="Contents">{listed(links)}</nav>\n'
        f'<main id="main" tabindex="-1">\n{chr(10).join(sections)}\n</main>\n</body></html>\n'
    )


_EXPLANATIONS = (
    "<b>tokens/s</b>: output tokens / time from sending to the last token, prompt included; median over the runs. "
    "With several clients: tokens of all / time from the first sent to the last ended. Failed requests' time counts.",
    "<b>TTFT</b>: request sent to first token. <b>TPOT</b>: (end-to-end - TTFT) / (output tokens - 1). Medians.",
    "<b>acceptance rate</b>: accepted / verified draft tokens. <b>tokens/pass</b>: mean acceptance length, the "
    "committed tokens per target pass that verified a proposal.",
    "<b>speed-up</b>: over the target alone (of endpoints alone: over the first) in the same "
    "run, same prompts, same network; median, and the lowest and highest of the runs. In short, <b>no difference</b> "
    "stands behind it where the end to end shows none.",
    "<b>times over those of the target alone</b>: geometric mean over pairs of answers to one prompt in one run, with "
    "the interval of 95 % confidence by bootstrap over those pairs. Below 1 is faster; where the interval holds 1, it "
    "says <b>no difference</b>: these runs show none. <b>ITL</b> there: (end-to-end - TTFT) / (output tokens - 1) of "
    "a request. <b>message_gap</b>: between messages of a stream, each with one token or several.",
    "<b>goodput</b>: answers within the limits of <code>--slo</code>, of all requests. Where these come on their own, "
    "times count from when each was due: waiting to be sent is waiting, too (no coordinated omission).",
    "<b>bound</b>: what theory allows (Leviathan et al., arXiv 2211.17192; see docs/comparison.md) with the draft step "
    "time, target pass times and acceptance measured here, the round trip time set, and the best length up to &gamma;. "
    "Service, scheduling and tokenizing are not counted. It assumes that draft tokens are accepted independently; if "
    "they are not, a few per cent more are possible. ngram often proposes fewer than &gamma; tokens; the bound counts "
    "full rounds.",
    "A proxy on loopback stands for the network. It is in every path of what was started, also at round trip 0, so "
    "that all topologies pay for it alike; client and proxy need a little of the same cores.",
)


def _verdict(findings: Findings) -> str:
    agreement = findings.agreement
    mood = "verdict" if agreement.holds else "verdict bad"
    shown = [escape(str(difference)) for difference in agreement.differences[:MAX_DIFFERENCES]]
    shown += map(escape, findings.warnings)
    return f'<p class="{mood}">{escape(str(agreement))}</p>{listed(shown) if shown else ""}'


def _emulated(findings: Findings) -> str:
    label = emulation_of(findings.config)
    return f'<p class="verdict bad">{escape(label)}. No figure here is this machine\'s.</p>' if label else ""


def listed(items: Sequence[str]) -> str:
    """Items are HTML already."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _title(kind: str) -> str:
    return kind.replace("_", " ").capitalize()


def figure(picture: Drawn, config: ComparisonConfig) -> str:
    data = base64.b64encode(picture.file.read_bytes()).decode("ascii")
    image = f'<img alt="{escape(picture.finding)}" src="data:image/png;base64,{data}">'
    caption = f'<h3>{escape(picture.title)}</h3><p class="small">Conditions: {escape(short_conditions(config))}</p>'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>\n"


def _results(findings: Findings, kind: str) -> str:
    summaries = [summary for summary in findings.summaries if summary.cell.kind == kind]
    services = [service for service in findings.services if service.cell.kind == kind]
    place, kind_of, label = place_columns(findings.config), f"{_title(kind)} prompts", emulation_of(findings.config)
    over = f"requests, and times over those of {findings.config.baseline_name}"
    names = [column.name for column in place]
    speed = [[*texts(place, summary.cell), *texts(FIGURES, summary)] for summary in summaries]
    served = [[*texts(place, service.cell), *_served(findings, service)] for service in services]
    figures = [[*texts(place, service.cell), *row] for service in services for row in _figures(service)]
    return (
        f"{f'<p>{escape(label)}</p>' if label else ''}"
        f"{table(f'{kind_of}: speed', [*names, *(column.name for column in FIGURES)], speed)}"
        f"{table(f'{kind_of}: {over}', [*names, *_SERVED], served)}"
        f"<details><summary>{escape(kind_of)}: every figure's distribution ({len(figures)} rows)</summary>"
        f"{table(f'{kind_of}: distributions', [*names, 'figure', *STATISTICS], figures)}</details>"
    )


_SERVED = ("answered", "errors", "per minute", "goodput", "TTFT, 95 %", "ITL, 95 %", "end to end, 95 %")


def _served(findings: Findings, service: Service) -> list[str]:
    errors = ", ".join(f"{code}: {count}" for code, count in service.errors.items())
    found = service.statistics()
    ratios = [findings.over_target(service, name) for name in LATENCIES]
    totals = f"{found['num_completed_requests_per_min']:.0f}", f"{found['goodput_share']:.0%}"
    over = ["-" if ratio is None else str(ratio) for ratio in ratios]
    return [f"{service.num_answered} of {len(service.requests)}", errors or "none", *totals, *over]


def _figures(service: Service) -> list[list[str]]:
    """A row per figure, times in milliseconds."""
    rows = []
    for name, values in service.statistics().items():
        if isinstance(values, dict) and "p50" in values:
            is_time = name in (*LATENCIES, "message_gap_s")
            scale, text = (1e3, f"{name.removesuffix('_s')}_ms") if is_time else (1.0, name)
            rows.append([text, *(f"{values[statistic] * scale:.4g}" for statistic in STATISTICS)])
    return rows


def table(caption: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """It scrolls where it is too wide, by keyboard too."""
    head = "".join(f'<th scope="col">{escape(name).replace(chr(10), " ")}</th>' for name in names)
    body = "".join(f"<tr>{_row(row)}</tr>\n" for row in rows)
    text = escape(caption)
    table = f"<table><caption>{text}</caption><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
    return f'<div class="scroll" role="region" aria-label="{text}" tabindex="0">{table}</div>\n'


def _row(cells: Sequence[str]) -> str:
    first, *others = (escape(cell) for cell in cells)
    return f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in others)


def told(conditions: Sequence[tuple[str, str]]) -> str:
    """Under which conditions it was measured."""
    return listed([f"<b>{escape(name)}</b>: {escape(text)}" for name, text in conditions])
