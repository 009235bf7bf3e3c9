"""What many values say: quantiles as LLMPerf has them, the knee of a curve. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

QUANTILES = (25, 50, 75, 90, 95, 99)
MIN_BEND = 0.15
"""Distance from the chord, in parts of the picture, below which a curve is a straight line."""


def describe(values: Sequence[float]) -> dict[str, float]:
    """p25 to p99 (on the line between neighbours), mean, min, max, stddev of a sample; nothing of nothing."""
    if not values:
        return {}
    quantiles = np.percentile(values, QUANTILES)
    named = {f"p{quantile}": float(value) for quantile, value in zip(QUANTILES, quantiles, strict=True)}
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {**named, "mean": float(np.mean(values)), "min": min(values), "max": max(values), "stddev": spread}


def knee(loads: Sequence[float], latencies: Sequence[float]) -> int | None:
    """Index at which latency begins to rise steeply with the load; None for a straight line, or below three points.

    Args:
        loads: rising.
        latencies: at those loads.

    The point farthest below the straight line from the first to the last one, with both axes scaled to 1 (Satopaa et
    al., "Finding a 'Kneedle' in a Haystack", 2011).
    """
    if len(loads) < 3 or latencies[-1] <= latencies[0]:
        return None
    x, y = ((np.asarray(axis) - axis[0]) / (axis[-1] - axis[0]) for axis in (loads, latencies))
    below = x - y
    return int(below.argmax()) if below.max() >= MIN_BEND else None
