"""When the next draft token of a session is due, judged from when the last ones came. Seconds, monotonic."""

from __future__ import annotations

_WEIGHT = 0.25  # of the newest measurement


class Arrivals:
    """Learns two delays: between messages of one chain, and from a rejection to the first message of the new chain.

    The second one holds a network round trip, the first does not.
    """

    def __init__(self) -> None:
        self._gap_s: float | None = None
        self._restart_s: float | None = None
        self._last: float | None = None  # the last message, or the commit that rejected its chain
        self._restarting = False

    def proposed(self, now: float) -> None:
        """A proposal has arrived."""
        if self._last is not None:
            delay = now - self._last
            if self._restarting:
                self._restart_s = _blend(self._restart_s, delay)
            else:
                self._gap_s = _blend(self._gap_s, delay)
        self._last, self._restarting = now, False

    def committed(self, now: float, *, all_accepted: bool) -> None:
        """A pass has committed; unless it accepted the whole proposal, the draft begins anew."""
        if not all_accepted:
            self._last, self._restarting = now, True

    def due_in(self, now: float) -> float | None:
        """Seconds until the next message is expected, negative if it is late; None while nothing is known."""
        delay = self._restart_s if self._restarting else self._gap_s
        return None if self._last is None or delay is None else self._last + delay - now


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
