"""Round-trip time to the target in seconds, from commits that acknowledge what was sent."""

from __future__ import annotations

from collections import deque

_NUM_SAMPLES = 32


class RoundTrip:
    """Round-trip time: the least of the latest samples, since all above it is queueing in network and processes."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_NUM_SAMPLES)

    @property
    def seconds(self) -> float:
        """Return the round-trip time; 0 while unknown."""
        return min(self._samples, default=0.0)

    def record(self, seconds: float) -> None:
        self._samples.append(seconds)


class Echoes:
    """Record of sent messages until commits acknowledge them; both sides count draft tokens to match them."""

    def __init__(self, round_trip: RoundTrip) -> None:
        self._round_trip = round_trip
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
            self._round_trip.record(max(0.0, now - when - hold_s))
