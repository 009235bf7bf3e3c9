"""Whether, and how long, a target without draft tokens should wait for those on their way. Seconds. Pure."""

from __future__ import annotations

import math

from inference.scheduling.arrivals import Arrivals
from inference.scheduling.pass_times import PassCosts

MAX_WAIT_OF_PASS = 1.5
"""So many passes the target waits at most for draft tokens that are due, whatever they did before."""


def wait_s(
    arrivals: Arrivals, acceptance_rate: float, costs: PassCosts, *, now: float, ready_s: float, num_own: float = 1.0
) -> float:
    """How long waiting for a session's draft tokens still pays; 0 or less is not at all.

    Args:
        arrivals: of the session's draft tokens.
        acceptance_rate: per token, of the session.
        costs: of passes over this session alone.
        now: the time, on the clock of `arrivals`.
        ready_s: for how long the session could have been in a pass.
        num_own: that a pass without a draft gives.
    """
    longest_s = MAX_WAIT_OF_PASS * costs.base_s
    delay_s, late_in_s = arrivals.delay_s, arrivals.late_in(now, at_most_s=longest_s)
    if delay_s is None or late_in_s is None or delay_s > longest_s:
        return 0.0
    pays = waiting_pays(
        delay_s, arrivals.num_tokens, acceptance_rate, pass_s=costs.base_s, slope_s=costs.slope_s, num_own=num_own
    )
    return min(late_in_s, longest_s - ready_s) if pays else 0.0


def waiting_pays(
    delay_s: float, num_tokens: int, rate: float, *, pass_s: float, slope_s: float, num_own: float = 1.0
) -> bool:
    """Whether always waiting for draft tokens gives more tokens per second than decoding alone meanwhile.

    Waiting after every rejection gives rounds. Not waiting gives a pass alone for every `pass_s` of the delay, and the
    tokens that come then are of use only if they agree with all tokens of those passes; if not, it goes alone again.

    Args:
        delay_s: from a rejection to the next draft tokens.
        num_tokens: how many come at once.
        rate: acceptance per token.
        pass_s, slope_s: a pass without draft tokens, and what each of them adds.
        num_own: what a pass alone gives, with what is looked up and forced.
    """
    if not pass_s:
        return False
    tokens = sum(rate**k for k in range(num_tokens + 1))  # of a pass with a proposal
    seconds = pass_s + slope_s * num_tokens
    rejected = 1.0 - rate**num_tokens
    num_meanwhile = math.ceil(delay_s / pass_s)
    num_alone: float = rejected * num_meanwhile / max(rate ** (num_meanwhile * num_own), 1e-9)
    tokens_alone = num_alone * num_own
    return tokens / (seconds + rejected * delay_s) > (tokens + tokens_alone) / (seconds + num_alone * pass_s)
