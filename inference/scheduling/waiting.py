"""Wait of a target for draft tokens on their way: when they are due, whether waiting pays. In seconds. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inference.scheduling.pass_times import PassCosts

MAX_WAIT_OF_PASS = 1.5
"""Longest wait of the target for draft tokens that are due, in passes."""
_WEIGHT = 0.25  # of the newest measurement
_DEVIATIONS = 2.0


@dataclass(slots=True)
class _Delay:
    """Mean and mean deviation, as TCP keeps them of round trips (RFC 6298)."""

    mean_s: float | None = None
    deviation_s: float = 0.0

    def record(self, delay_s: float) -> None:
        if self.mean_s is None:
            self.mean_s, self.deviation_s = delay_s, delay_s / 2
            return
        error = delay_s - self.mean_s
        self.deviation_s += _WEIGHT * (abs(error) - self.deviation_s)
        self.mean_s += _WEIGHT * error

    @property
    def limit_s(self) -> float | None:
        """Return the delay after which a message is late."""
        return None if self.mean_s is None else self.mean_s + _DEVIATIONS * self.deviation_s


class Arrivals:
    """Estimates of two delays: between messages of a chain, and from a rejection to the new chain's first message.

    The second one contains a network round trip, the first does not.
    """

    def __init__(self) -> None:
        self._gap = _Delay()
        self._restart = _Delay()
        self._num_tokens = 1.0
        self._last: float | None = None  # the last message, or the commit that rejected its chain
        self._restarting = False

    def proposed(self, now: float, num_tokens: int) -> None:
        """Record the arrival of a proposal."""
        if self._last is not None:
            self._delay.record(now - self._last)
        self._num_tokens += _WEIGHT * (num_tokens - self._num_tokens)
        self._last, self._restarting = now, False

    def committed(self, now: float, *, all_accepted: bool) -> None:
        """Record a pass; unless it accepted the whole proposal, the draft begins a new chain."""
        if not all_accepted:
            self._last, self._restarting = now, True

    @property
    def _delay(self) -> _Delay:
        return self._restart if self._restarting else self._gap

    @property
    def num_tokens(self) -> int:
        """Return the usual number of draft tokens per message, at least 1."""
        return max(1, round(self._num_tokens))

    @property
    def delay_s(self) -> float | None:
        """Return the usual time from the last message, or the rejection, to the next message; None while unknown."""
        return self._delay.mean_s

    def late_in(self, now: float, *, at_most_s: float) -> float | None:
        """Return the time until the next message will be late, negative if it is; None while unknown.

        Args:
            now: the time.
            at_most_s: a message that comes later than this after the last one is late.
        """
        limit_s = self._delay.limit_s
        return None if self._last is None or limit_s is None else self._last + min(limit_s, at_most_s) - now


def wait_s(
    arrivals: Arrivals, acceptance_rate: float, costs: PassCosts, *, now: float, ready_s: float, num_own: float = 1.0
) -> float:
    """Return for how long waiting for a session's draft tokens still pays; 0 or less is not at all.

    Args:
        arrivals: arrivals of the session's draft tokens.
        acceptance_rate: the session's acceptance per token.
        costs: costs of passes over this session alone.
        now: the time, on the clock of `arrivals`.
        ready_s: seconds for which the session could have been in a pass.
        num_own: number of tokens that a pass without a draft gives.
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
    """Return whether always waiting for draft tokens gives more tokens per second than decoding alone meanwhile.

    Waiting after every rejection gives rounds. Not waiting gives a pass alone for every `pass_s` of the delay, and the
    tokens that come then are of use only if they agree with all tokens of those passes; if not, it goes alone again.

    Args:
        delay_s: seconds from a rejection to the next draft tokens.
        num_tokens: number of tokens that come at once.
        rate: acceptance per token.
        pass_s, slope_s: seconds of a pass without draft tokens, and what each of them adds.
        num_own: number of tokens that a pass alone gives, with those looked up and forced.
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
