"""Wait of a target for draft tokens: when the next ones are due, and whether waiting for them pays.

All times are in seconds. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from inference.scheduling.pass_times import PassCosts

MAX_WAIT_OF_PASS = 1.5
"""Longest wait of the target for draft tokens, in passes."""
_WEIGHT = 0.25  # of the newest measurement
_DEVIATIONS = 2.0  # past the mean delay, a message is late


@dataclass(slots=True)
class _Delay:
    """Mean and mean deviation of a delay, estimated as TCP estimates its round-trip time (RFC 6298)."""

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
    """Estimates of two delays: between two messages of a chain, and from a rejection to a new chain's first message.

    Only the second contains a network round trip, for the draft must learn of the rejection.
    """

    def __init__(self) -> None:
        self._gap = _Delay()
        self._restart = _Delay()
        self._num_tokens = 1.0
        self._last: float | None = None  # time of the last message, or of a later commit that rejected its chain
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
        """Return the recent mean of draft tokens per message, at least 1."""
        return max(1, round(self._num_tokens))

    @property
    def delay_s(self) -> float | None:
        """Return the mean time from the last message, or a later rejection, to the next message; None while unknown."""
        return self._delay.mean_s

    def due_in(self, now: float) -> float | None:
        """Return the seconds until the next message is due, at least 0; None while unknown."""
        delay_s = self._delay.mean_s
        return None if self._last is None or delay_s is None else max(0.0, self._last + delay_s - now)

    def late_in(self, now: float) -> float | None:
        """Return the seconds until the next message counts as late; negative if it is late, None while unknown."""
        limit_s = self._delay.limit_s
        return None if self._last is None or limit_s is None else self._last + limit_s - now


def wait_s(
    arrivals: Arrivals, acceptance_rate: float, costs: PassCosts, *, now: float, ready_s: float, num_own: float = 1.0
) -> float:
    """Return the seconds for which waiting for a session's draft tokens still pays; 0 or less means not to wait.

    Args:
        arrivals: arrivals of the session's draft tokens.
        acceptance_rate: the session's acceptance per token.
        costs: costs of passes that this session shares with no other.
        now: the present time, on the clock of `arrivals`.
        ready_s: seconds for which the session could have been in a pass.
        num_own: number of tokens that a pass without a draft gives.
    """
    longest_s = MAX_WAIT_OF_PASS * costs.base_s
    delay_s, due_s, late_s = arrivals.delay_s, arrivals.due_in(now), arrivals.late_in(now)
    if delay_s is None or due_s is None or late_s is None or due_s > longest_s:
        return 0.0
    pays = waiting_pays(
        due_s,
        delay_s,
        arrivals.num_tokens,
        acceptance_rate,
        pass_s=costs.base_s,
        slope_s=costs.slope_s,
        num_own=num_own,
    )
    return min(late_s, longest_s - ready_s) if pays else 0.0


def waiting_pays(
    due_s: float, delay_s: float, num_tokens: int, rate: float, *, pass_s: float, slope_s: float, num_own: float = 1.0
) -> bool:
    """Return whether waiting for draft tokens gives more tokens per second than decoding without a draft meanwhile.

    A target that does not wait fills the time until they are due with passes without draft tokens: as many as fit into
    it, or one more, which ends after they have come. They are of use only if they agree with all tokens of those
    passes; if they disagree, the draft begins again, and its next tokens are a whole delay away. Lost time is worth
    the tokens per second of a target that does, after each rejection, the passes that fit, and then waits.

    Args:
        due_s: seconds until draft tokens are due.
        delay_s: seconds from a rejection to the next draft tokens.
        num_tokens: number of draft tokens that arrive together.
        rate: probability that the target accepts a draft token, if it accepted all before it.
        pass_s: seconds of a pass without draft tokens.
        slope_s: seconds that each draft token adds to a pass.
        num_own: mean number of tokens of a pass without a draft model's; above 1 where lookup or a grammar adds some.
    """
    if not pass_s:
        return False
    tokens = sum(rate**k for k in range(num_tokens + 1))  # expected of the pass that verifies the proposal
    rejection_rate = 1.0 - rate**num_tokens
    num_meanwhile = math.floor(delay_s / pass_s)  # passes that fit into a delay
    tokens_per_s = (tokens + rejection_rate * num_meanwhile * num_own) / (
        pass_s + slope_s * num_tokens + rejection_rate * delay_s
    )
    begin_again = tokens_per_s * delay_s - num_meanwhile * num_own  # tokens that it costs
    for num_passes in {max(1, math.floor(due_s / pass_s)), max(1, math.ceil(due_s / pass_s))}:
        agreement_rate = rate ** (num_passes * num_own)  # of draft tokens with the tokens of these passes
        lost_s = max(0.0, num_passes * pass_s - due_s)  # for which the draft tokens lie unused
        if tokens_per_s * lost_s + (1.0 - agreement_rate) * begin_again <= num_passes * num_own:
            return False
    return True
