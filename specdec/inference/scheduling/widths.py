"""Widths: how many draft tokens of each session a pass verifies, by expected tokens and measured pass times.

If each draft token of a session is accepted with probability a, the k-th one gains a^k tokens. The draft tokens of all
sessions are added in order of their gain, and the number with the most tokens per second is taken. That maximises the
throughput of the whole pass: a single session gets many draft tokens, each of many sessions gets few, and a session
with a poor draft gets none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from specdec.inference.scheduling.throughput import fastest


def choose_widths(available: Sequence[int], rates: Sequence[float], seconds: Callable[[int], float]) -> list[int]:
    """Return how many draft tokens of each session to verify in one pass.

    Args:
        available: number of draft tokens that have arrived, per session of the pass.
        rates: probability that a draft token is accepted if all before it were, per session.
        seconds: function from the number of draft tokens in a pass to its seconds; it never falls.

    Returns:
        Number of draft tokens per session, at most the available ones, that maximises expected tokens per second.
    """
    gains = ((rate**place, i) for i, rate in enumerate(rates) for place in range(1, available[i] + 1))
    order = sorted(gains, key=lambda each: -each[0])
    own = float(len(available))  # each session gets a token of the target's own
    expected = itertools.accumulate((gain for gain, _ in order), initial=own)
    best = fastest((tokens, seconds(number)) for number, tokens in enumerate(expected))
    widths = [0] * len(available)
    for _, session in order[:best]:
        widths[session] += 1
    return widths
