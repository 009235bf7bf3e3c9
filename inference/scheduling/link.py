"""Link of a draft worker to one target: the round trip and the target's passes, in seconds, as commits report them.

What a session measures is where the next session at the same target begins, so that it drafts at the right pace before
its first commit, which is a round trip and the reading of a prompt away. Pure.
"""

from __future__ import annotations

from collections import deque

_NUM_ROUND_TRIPS = 32
_NUM_PASSES = 15
"""Number of latest passes, the median of which counts: a mean would contain the first, which reads the prompt."""


class Link:
    """Times of one session's link; `earlier` is that of an earlier session at the same target.

    The round trip is the least of the latest samples, since all above it is queueing in network and processes. An
    earlier session's counts only until the first sample: the network may have become slower.
    """

    def __init__(self, earlier: Link | None = None) -> None:
        self._earlier_round_trip_s = earlier.round_trip_s if earlier else 0.0
        self._round_trips_s: deque[float] = deque(maxlen=_NUM_ROUND_TRIPS)
        passes_s = [earlier.pass_s] if earlier and earlier.pass_s else []
        self._passes_s = deque(passes_s, maxlen=_NUM_PASSES)

    @property
    def round_trip_s(self) -> float:
        """Return the round-trip time; 0 while unknown."""
        return min(self._round_trips_s, default=self._earlier_round_trip_s)

    @property
    def pass_s(self) -> float:
        """Return the median time of the target's latest passes, the lower of two; 0 while unknown."""
        return sorted(self._passes_s)[(len(self._passes_s) - 1) // 2] if self._passes_s else 0.0

    def record_round_trip(self, seconds: float) -> None:
        self._round_trips_s.append(seconds)

    def record_pass(self, seconds: float) -> None:
        self._passes_s.append(seconds)


class Echoes:
    """Record of sent messages until commits acknowledge them; both sides count draft tokens to match them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent: deque[tuple[int, float]] = deque()  # (tokens sent up to the end of a message, time)

    def sent(self, num_tokens: int, now: float) -> None:
        """Record a sent message; `num_tokens` counts all tokens up to its end."""
        self._sent.append((num_tokens, now))

    def received(self, num_tokens: int, hold_s: float, now: float) -> None:
        """Record a commit that acknowledges `num_tokens`, the last of which arrived `hold_s` before it."""
        when = None
        while self._sent and self._sent[0][0] <= num_tokens:
            when = self._sent.popleft()[1]
        if when is not None:
            self._link.record_round_trip(max(0.0, now - when - hold_s))
