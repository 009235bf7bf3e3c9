"""Whether a target without draft tokens should wait for those on their way. Pure."""

from __future__ import annotations

import math

MAX_WAIT_OF_PASS = 1.5
"""So many passes the target waits at most for draft tokens that are due, whatever they did before."""


def waiting_pays(delay_s: float, num_tokens: int, rate: float, *, pass_s: float, slope_s: float) -> bool:
    """Whether a target without draft tokens should wait for those on their way, judged by how it would go on for ever.

    Waiting after every rejection gives rounds. Not waiting gives a pass alone for every `pass_s` of the delay, and the
    tokens that come then are of use only if they agree with those passes; if not, it goes alone again.

    Args:
        delay_s: from a rejection to the next draft tokens.
        num_tokens: how many come at once.
        rate: acceptance per token.
        pass_s, slope_s: a pass without draft tokens, and what each of them adds.
    """
    if not pass_s:
        return False
    tokens = sum(rate**k for k in range(num_tokens + 1))  # of a pass with a proposal
    seconds = pass_s + slope_s * num_tokens
    rejected = 1.0 - rate**num_tokens
    num_meanwhile = math.ceil(delay_s / pass_s)
    num_alone = rejected * num_meanwhile / max(rate**num_meanwhile, 1e-9)
    return tokens / (seconds + rejected * delay_s) > (tokens + num_alone) / (seconds + num_alone * pass_s)
