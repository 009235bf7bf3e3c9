"""What requests cost in the terms of LLMPerf. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from comparison.report.service import values_of
from inference.cli.prompts.results import Result


def samples(results: Sequence[Result]) -> dict[str, list[float]]:
    """Every figure's values, of the requests that were answered."""
    return values_of([result.stats for result in results if result.error is None])


def acceptance(results: Sequence[Result]) -> float | None:
    """Accepted share of all draft tokens."""
    drafted = sum(result.stats.num_draft_tokens for result in results)
    return sum(result.stats.num_accepted_tokens for result in results) / drafted if drafted else None
