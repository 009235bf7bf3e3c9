"""When the next draft tokens of a session are due, judged from when the last ones came. Seconds, monotonic."""

from __future__ import annotations

from dataclasses import dataclass

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
        """What comes later than this is late."""
        return None if self.mean_s is None else self.mean_s + _DEVIATIONS * self.deviation_s


class Arrivals:
    """Learns two delays: between messages of one chain, and from a rejection to the first message of the new chain.

    The second one holds a network round trip, the first does not.
    """

    def __init__(self) -> None:
        self._gap = _Delay()
        self._restart = _Delay()
        self._num_tokens = 1.0
        self._last: float | None = None  # the last message, or the commit that rejected its chain
        self._restarting = False

    def proposed(self, now: float, num_tokens: int) -> None:
        """A proposal has arrived."""
        if self._last is not None:
            self._delay.record(now - self._last)
        self._num_tokens += _WEIGHT * (num_tokens - self._num_tokens)
        self._last, self._restarting = now, False

    def committed(self, now: float, *, all_accepted: bool) -> None:
        """A pass has committed; unless it accepted the whole proposal, the draft begins anew."""
        if not all_accepted:
            self._last, self._restarting = now, True

    @property
    def _delay(self) -> _Delay:
        return self._restart if self._restarting else self._gap

    @property
    def num_tokens(self) -> int:
        """Draft tokens per message of late, at least 1."""
        return max(1, round(self._num_tokens))

    @property
    def delay_s(self) -> float | None:
        """Usual time to the next message from where its chain began or was last extended; None while unknown."""
        return self._delay.mean_s

    def late_in(self, now: float, *, at_most_s: float) -> float | None:
        """Seconds until the next message will be late, negative if it is; None while nothing is known.

        Args:
            now: the time.
            at_most_s: whatever comes later than this after the last one is late.
        """
        limit_s = self._delay.limit_s
        return None if self._last is None or limit_s is None else self._last + min(limit_s, at_most_s) - now
