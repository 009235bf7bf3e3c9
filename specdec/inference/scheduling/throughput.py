"""Rule of all speculation: of several plans, take the one with the most expected tokens per second.

Plans differ in their draft tokens: how many are drafted before a pass or sent in a message, how many a pass verifies,
and whether it waits for them. A draft token costs time, and gains a token if the target accepts it and all draft tokens
before it. This is the rule of Leviathan et al. (arXiv 2211.17192) for the speculation length, on measured times. The
time of a pass rises with its tokens in steps, so a few draft tokens may be worse than none, and a larger number best.
"""

from __future__ import annotations

from collections.abc import Iterable


def fastest(plans: Iterable[tuple[float, float]]) -> int:
    """Return the index of the plan with the most tokens per second; of equal ones, the last.

    Args:
        plans: expected tokens and seconds of each plan; all seconds are 0 while nothing is measured.
    """
    best, best_tokens, best_s = 0, 0.0, 1.0
    for index, (tokens, seconds) in enumerate(plans):
        if seconds * best_tokens <= tokens * best_s:
            best, best_tokens, best_s = index, tokens, seconds
    return best
