"""What requests cost in the terms of LLMPerf: quantiles, mean and spread of each figure. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inference.cli.prompts.results import Result

QUANTILES = (25, 50, 75, 90, 95, 99)


def samples(results: Sequence[Result]) -> dict[str, list[float]]:
    """Every figure's values; inter_token_latency_s has one per request, as LLMPerf's: its mean over the tokens."""
    done = [result.stats for result in results if result.error is None]
    return {
        "ttft_s": [stats.ttft_s for stats in done],
        "inter_token_latency_s": [stats.tpot_s for stats in done if stats.tpot_s is not None],
        "message_gap_s": [gap for stats in done for gap in stats.itl_s],
        "end_to_end_latency_s": [stats.end_to_end_s for stats in done],
        "request_output_throughput_token_per_s": [stats.tokens_per_s for stats in done],
        "number_input_tokens": [float(stats.num_prompt_tokens) for stats in done],
        "number_output_tokens": [float(stats.num_output_tokens) for stats in done],
    }


def describe(values: Sequence[float]) -> dict[str, float]:
    """p25 to p99, mean, min, max, stddev; nothing of nothing."""
    if not values:
        return {}
    quantiles = np.percentile(values, QUANTILES)
    named = {f"p{quantile}": float(value) for quantile, value in zip(QUANTILES, quantiles, strict=True)}
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {**named, "mean": float(np.mean(values)), "min": min(values), "max": max(values), "stddev": spread}


def acceptance(results: Sequence[Result]) -> float | None:
    """Accepted share of all draft tokens."""
    drafted = sum(result.stats.num_draft_tokens for result in results)
    return sum(result.stats.num_accepted_tokens for result in results) / drafted if drafted else None
