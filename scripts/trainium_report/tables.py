"""The page: one table per kind of prompt, what differs between the answers, what failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from comparison.report.distribution import describe
from inference.cli.prompts.results import Result
from scripts.trainium_report.distribution import acceptance, samples
from scripts.trainium_report.variant import Variant

SHOWN = ("p50", "p99")


def report(variants: Sequence[Variant], failure: str | None) -> str:
    """As Markdown."""
    lines = ["# Without and with a draft", ""]
    for variant in variants:
        start = "did not start" if variant.start_s is None else f"served after {variant.start_s:.0f} s"
        lines.append(f"- {variant.name}: `main.py {' '.join(variant.arguments)}` ({start})")
    if failure:
        lines += ["", "Failed:", "", *(f"    {line}" for line in failure.splitlines())]
    for kind in kinds(variants):
        lines += ["", f"## {kind}", "", *_table(variants, kind)]
    return "\n".join([*lines, "", *_answers(variants), ""])


def kinds(variants: Sequence[Variant]) -> list[str]:
    """Of prompts that were answered, in their order."""
    return list(dict.fromkeys(result.prompt for variant in variants for result in variant.results))


def figures(variant: Variant, kind: str) -> dict[str, Any]:
    """All of one variant and kind, as results.json has it."""
    results = _of(variant, kind)
    errors = [str(result.error) for result in results if result.error is not None]
    return {
        "variant": variant.name,
        "kind": kind,
        **{name: describe(values) for name, values in samples(results).items()},
        "acceptance_rate": acceptance(results),
        "num_completed_requests": len(results) - len(errors),
        "num_completed_requests_per_min_all_kinds": _per_minute(variant),
        "errors": errors,
    }


def _per_minute(variant: Variant) -> float:
    done = sum(result.error is None for result in variant.results)
    return 60 * done / variant.load_s if variant.load_s else 0.0


def _of(variant: Variant, kind: str) -> list[Result]:
    return [result for result in variant.results if result.prompt == kind]


def _table(variants: Sequence[Variant], kind: str) -> Iterator[str]:
    cells = [figures(variant, kind) for variant in variants]
    columns = [f"{cell['variant']}, {name}" for cell in cells for name in SHOWN]
    yield "| figure | " + " | ".join(columns) + " | p50 ratio |"
    yield "|---|" + "---|" * (len(cells) * len(SHOWN) + 1)
    for figure in samples([]):
        values = [cell[figure].get(name) for cell in cells for name in SHOWN]
        yield f"| {figure} | " + " | ".join(map(_number, values)) + f" | {_ratio(values)} |"
    for figure in ("acceptance_rate", "num_completed_requests"):
        texts = [text for cell in cells for text in (_number(cell[figure]), "")]
        yield f"| {figure} | " + " | ".join(texts) + " |  |"
    yield "| errors | " + " | ".join(text for cell in cells for text in (str(len(cell["errors"])), "")) + " |  |"


def _ratio(values: Sequence[float | None]) -> str:
    """Of the last variant's p50 to the first one's."""
    first, last = values[0], values[-len(SHOWN)]
    return _number(last / first) if first and last is not None else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _answers(variants: Sequence[Variant]) -> Iterator[str]:
    """Whether they are equal: in bfloat16 a near-tie may flip, in float32 none was seen."""
    first, *others = [variant.results for variant in variants]
    for other in others:
        pairs = [pair for pair in zip(first, other, strict=False) if not any(result.error for result in pair)]
        equal = sum(one.token_ids == two.token_ids for one, two in pairs)
        yield f"Equal answers: {equal} of {len(pairs)}."
