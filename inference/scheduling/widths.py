"""Widths: how many draft tokens are worth verifying, by expected tokens and measured pass times. Pure.

A target pass with W draft tokens takes about base + slope * W. A session whose draft is accepted with probability a per
token gains a^k tokens from the k-th draft token, which costs slope seconds. Draft tokens are added, the most probable
first, as long as this raises tokens per second. That maximises the throughput of the whole pass: a single session gets
many draft tokens, sessions under load get few, and one with a poor draft none. The expectation is from Leviathan et al.
(arXiv 2211.17192).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from inference.scheduling.pass_times import PassCosts

PROBE_EVERY = 32
"""Number of passes that decline all draft tokens, after which one pass verifies those of one session."""


class Widths:
    """Choice of how many draft tokens each pass verifies. Where none pay, one of PROBE_EVERY passes tries some."""

    def __init__(self) -> None:
        self._num_declined = 0

    def choose(
        self, available: Sequence[int], rates: Sequence[float], costs: PassCosts, *, probes: Sequence[int] = ()
    ) -> list[int]:
        """Return how many draft tokens of each session to verify; see `choose_widths`.

        Args:
            probes: number of draft tokens per session that such a try verifies; by default all that are available.
        """
        widths = choose_widths(available, rates, base_s=costs.base_s, slope_s=costs.slope_s)
        return self._probed(probes or available) if any(available) and not any(widths) else widths

    def _probed(self, probes: Sequence[int]) -> list[int]:
        """Return no draft tokens; in one of PROBE_EVERY passes, those of one session: their cost may have changed."""
        self._num_declined += 1
        probed = probes.index(max(probes)) if self._num_declined % PROBE_EVERY == 0 else None
        return [number if place == probed else 0 for place, number in enumerate(probes)]


def choose_widths(available: Sequence[int], rates: Sequence[float], *, base_s: float, slope_s: float) -> list[int]:
    """Return how many draft tokens of each session to verify in one pass.

    Args:
        available: number of draft tokens that have arrived, per session of the pass.
        rates: probability that a draft token is accepted if all before it were, per session.
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
