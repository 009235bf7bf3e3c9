"""How many draft tokens are worth verifying: the arithmetic of expected tokens against measured pass times. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

PROBE_EVERY = 32
"""Of so many passes that take no draft tokens though there are some, one takes a session's."""


def choose_widths(available: Sequence[int], rates: Sequence[float], *, base_s: float, slope_s: float) -> list[int]:
    """How many draft tokens of each session to verify in one pass.

    Args:
        available: draft tokens at hand, per session of the pass.
        rates: acceptance per token, per session.
        base_s, slope_s: the pass takes base_s + slope_s * draft tokens.

    Returns:
        Widths that maximise expected tokens per second, each at most what is available.
    """
    widths = [0] * len(available)
    tokens = float(len(available))  # each session's own token
    seconds = base_s
    gains = [(-rate, i) for i, rate in enumerate(rates) if available[i]]
    heapq.heapify(gains)
    while gains:
        negative_gain, i = heapq.heappop(gains)
        if -negative_gain * seconds < slope_s * tokens:  # would lower tokens / seconds
            break
        widths[i] += 1
        tokens -= negative_gain
        seconds += slope_s
        if widths[i] < available[i]:
            heapq.heappush(gains, (negative_gain * rates[i], i))
    return widths
