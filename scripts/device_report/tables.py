"""Page of the report: a table for each kind of prompts, the number of equal answers, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scripts.device_report.steps import Done
from scripts.device_report.variant import Variant
from specdec.comparison.report.service import values_of

SHOWN = ("p50", "p99")
COUNTED = (
    *("acceptance_rate", "mean_output_throughput_token_per_s"),
    *("num_completed_requests", "num_completed_requests_per_min", "number_errors"),
)


def report(variants: Sequence[Variant], failure: str | None, steps: Sequence[Done] = ()) -> str:
    """Return the report as a Markdown page: first the device's own tests and benchmarks, then the servers' figures.

    `failure` is the error that ended the measurement; None if there was none.
    """
    lines = [line for done in steps for line in done.lines()]
    lines += ["# Without and with a draft", ""]
    for variant in variants:
        start = "did not start" if variant.start_s is None else f"served after {variant.start_s:.0f} s"
        lines.append(f"- {variant.name}: `main.py {' '.join(variant.arguments)}` ({start})")
    if failure:
        lines += ["", "Failed:", "", *(f"    {line}" for line in failure.splitlines())]
    for kind, cells in by_kind(variants).items():
        lines += ["", f"## {kind}", "", *_table(cells)]
    return "\n".join([*lines, "", *_answers(variants), ""])


def by_kind(variants: Sequence[Variant]) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of all measured servers, by kind of prompts."""
    found: dict[str, list[dict[str, Any]]] = {}
    for variant in variants:
        for kind, cell in variant.figures().items():
            found.setdefault(kind, []).append(cell)
    return found


def _table(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    columns = [f"{cell['variant']}, {name}" for cell in cells for name in SHOWN]
    yield "| figure | " + " | ".join(columns) + " | p50 ratio |"
    yield "|---|" + "---|" * (len(cells) * len(SHOWN) + 1)
    for figure in values_of([]):
        values = [cell[figure].get(name) for cell in cells for name in SHOWN]
        yield f"| {figure} | " + " | ".join(map(_number, values)) + f" | {_ratio(values)} |"
    for figure in COUNTED:
        texts = [text for cell in cells for text in (_number(cell[figure]), "")]
        yield f"| {figure} | " + " | ".join(texts) + " |  |"


def _ratio(values: Sequence[float | None]) -> str:
    """Return the last server's median over the first server's, as text; "-" if one of them is unknown."""
    first, last = values[0], values[-len(SHOWN)]
    return _number(last / first) if first and last is not None else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _answers(variants: Sequence[Variant]) -> Iterator[str]:
    """Yield a line for each further server: how many of its answers equal the first server's.

    Where two tokens are almost equally probable, answers may differ without `--exact` (docs/speculation.md).
    """
    first, *others = [variant.answers for variant in variants]
    for other in others:
        both = first.keys() & other.keys()
        yield f"Equal answers: {sum(first[key] == other[key] for key in both)} of {len(both)}."
