"""Waiting of a target for the tokens of a draft worker: when the next ones are due, and whether waiting for them pays.

All times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.inference.request import Schedule
from specdec.inference.scheduling.pass_times import PassCosts
from specdec.inference.scheduling.throughput import fastest

CROWDED = 2.0
"""Time of a pass over all sessions, as a multiple of a pass over one, from which synchronous rounds, in which each pass
of a session waits for its draft tokens, beat run-ahead."""
MAX_WAIT_OF_PASS = 1.5
"""Longest wait of the target for draft tokens, in passes."""
_WEIGHT = 0.25  # of the newest measurement
_DEVIATIONS = 2.0  # past the mean delay, a message is late


def schedule_for(alone_s: float, together_s: float) -> Schedule:
    """Return synchronous rounds if passes over all sessions take much longer than passes over one, else run-ahead.

    A session that joins a long pass without draft tokens delays the others for one token. One that waits for its draft
    tokens delays no other session, since the others keep the target busy meanwhile.

    Args:
        alone_s: seconds of a pass over one session; 0 while unknown.
        together_s: seconds of a pass over all sessions; 0 while unknown.
    """
    return Schedule.SYNC if together_s > CROWDED * alone_s > 0 else Schedule.ASYNC


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
        """Return the seconds after which a message counts as late; None while no delay is known."""
        return None if self.mean_s is None else self.mean_s + _DEVIATIONS * self.deviation_s


class Arrivals:
    """Arrivals of a draft worker's messages at a target, for one session.

    Two delays are estimated: between two messages of a chain of draft tokens, and from a rejection to the first message
    of a new chain. Only the second contains a network round trip, since the draft must learn of the rejection first.
    """

    def __init__(self) -> None:
        self._gap = _Delay()
        self._restart = _Delay()
        self._num_tokens = 1.0
        self._last: float | None = None  # time of the last message, or of a later commit that rejected its chain
        self._restarting = False

    def proposed(self, now: float, num_tokens: int) -> None:
        """Record that a message with `num_tokens` draft tokens has arrived at `now`."""
        if self._last is not None:
            self._delay.record(now - self._last)
        self._num_tokens += _WEIGHT * (num_tokens - self._num_tokens)
        self._last, self._restarting = now, False

    def committed(self, now: float, *, all_accepted: bool) -> None:
        """Record a pass that ended `now`; unless it accepted its whole proposal, the draft must begin a new chain."""
        if not all_accepted:
            self._last, self._restarting = now, True

    @property
    def _delay(self) -> _Delay:
        return self._restart if self._restarting else self._gap

    @property
    def num_tokens(self) -> int:
        """Return the recent mean number of draft tokens per message, at least 1."""
        return max(1, round(self._num_tokens))

    @property
    def delay_s(self) -> float | None:
        """Return the mean seconds from the last message, or a later rejection, to the next; None while unknown."""
        return self._delay.mean_s

    def late_in(self, now: float, *, at_most_s: float) -> float | None:
        """Return the seconds until the next message counts as late; negative if it is late, None while unknown.

        Args:
            now: the present time.
            at_most_s: delay after which a message counts as late in any case, however long the usual delay is.
        """
        limit_s = self._delay.limit_s
        return None if self._last is None or limit_s is None else self._last + min(limit_s, at_most_s) - now


def wait_s(
    arrivals: Arrivals, acceptance_rate: float, costs: PassCosts, *, now: float, ready_s: float, num_own: float = 1.0
) -> float:
    """Return for how many more seconds a target should wait for a session's draft tokens; 0 or less: not at all.

    Args:
        arrivals: arrivals of the session's draft tokens.
        acceptance_rate: probability that the target accepts a draft token, if it accepted all before it.
        costs: costs of passes over this session alone.
        now: the present time, on the clock of `arrivals`.
        ready_s: seconds for which the session could have been in a pass.
        num_own: mean number of tokens that a pass without the draft's tokens commits.
    """
    pass_s = costs.seconds(0)
    longest_s = MAX_WAIT_OF_PASS * pass_s
    delay_s, late_in_s = arrivals.delay_s, arrivals.late_in(now, at_most_s=longest_s)
    if delay_s is None or late_in_s is None or delay_s > longest_s:
        return 0.0
    num_tokens = arrivals.num_tokens
    verify_s = costs.seconds(num_tokens)
    pays = waiting_pays(delay_s, num_tokens, acceptance_rate, pass_s=pass_s, verify_s=verify_s, num_own=num_own)
    return min(late_in_s, longest_s - ready_s) if pays else 0.0


def waiting_pays(
    delay_s: float, num_tokens: int, rate: float, *, pass_s: float, verify_s: float, num_own: float = 1.0
) -> bool:
    """Return whether waiting after each rejection gives more tokens per second than decoding alone meanwhile.

    Both ways begin with a pass that verifies a proposal, of which it may reject a token. After a rejection the next
    draft tokens arrive `delay_s` later. A target that waits loses this time. A target that does not wait fills the
    delay with passes without draft tokens. The draft tokens that arrive then continue from the rejection, so they help
    only if they agree with all tokens of those passes. If they disagree, another such delay follows, and so on.

    Args:
        delay_s: seconds from a rejection to the next draft tokens.
        num_tokens: number of draft tokens that arrive together.
        rate: probability that the target accepts a draft token, if it accepted all before it.
        pass_s: seconds of a pass without draft tokens.
        verify_s: seconds of a pass that verifies `num_tokens` draft tokens.
        num_own: mean number of tokens that a pass without a draft model's tokens commits; above 1 where prompt lookup
            or a grammar adds some.
    """
    if not pass_s:
        return False
    tokens = sum(rate**k for k in range(num_tokens + 1))  # expected of the pass that verifies the proposal
    rejection_rate = 1.0 - rate**num_tokens
    passes_per_delay = math.ceil(delay_s / pass_s)
    agreement_rate = max(rate ** (passes_per_delay * num_own), 1e-9)  # of draft tokens with the tokens of one delay
    num_passes: float = rejection_rate * passes_per_delay / agreement_rate  # expected number without draft tokens
    waiting = tokens, verify_s + rejection_rate * delay_s
    decoding = tokens + num_passes * num_own, verify_s + num_passes * pass_s
    return fastest([waiting, decoding]) == 0
