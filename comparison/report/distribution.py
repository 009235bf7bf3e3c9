"""Statistics of values: quantiles as in LLMPerf, the knee of a curve. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

QUANTILES = (25, 50, 75, 90, 95, 99)
MIN_BEND = 0.15
"""Distance from the chord, as a share of the axes, below which a curve counts as straight."""


def describe(values: Sequence[float]) -> dict[str, float]:
    """Return p25 to p99 (linearly interpolated), mean, min, max and stddev of a sample; empty for no values."""
    if not values:
        return {}
    quantiles = np.percentile(values, QUANTILES)
    named = {f"p{quantile}": float(value) for quantile, value in zip(QUANTILES, quantiles, strict=True)}
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {**named, "mean": float(np.mean(values)), "min": min(values), "max": max(values), "stddev": spread}


def knee(loads: Sequence[float], latencies: Sequence[float]) -> int | None:
    """Return the index from which latency rises steeply with the load; None for a straight line, or below three points.

    It is the point farthest below the line from the first to the last point, with both axes scaled to 1 (Satopaa et
    al., "Finding a 'Kneedle' in a Haystack", 2011).

    Args:
        loads: ascending loads.
        latencies: latencies at those loads.
    """
    if len(loads) < 3 or latencies[-1] <= latencies[0]:
        return None
    x, y = ((np.asarray(axis) - axis[0]) / (axis[-1] - axis[0]) for axis in (loads, latencies))
    below = x - y
    return int(below.argmax()) if below.max() >= MIN_BEND else None
