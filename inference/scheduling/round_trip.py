"""How long it takes to the target and back, from the commits' echoes of what was sent. Seconds."""

from __future__ import annotations

from collections import deque

_NUM_SAMPLES = 32


class RoundTrip:
    """The least of the latest samples: what comes on top of it is queues, on the way and in the processes."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_NUM_SAMPLES)

    @property
    def seconds(self) -> float:
        """0 while unknown."""
        return min(self._samples, default=0.0)

    def record(self, seconds: float) -> None:
        self._samples.append(seconds)


class Echoes:
    """Finds the message that a commit acknowledges: tokens are counted on both sides."""

    def __init__(self, round_trip: RoundTrip) -> None:
        self._round_trip = round_trip
        self._sent: deque[tuple[int, float]] = deque()  # tokens up to and including a message, and when it was sent

    def sent(self, num_tokens: int, now: float) -> None:
        """A message has left; `num_tokens` have been sent so far."""
        self._sent.append((num_tokens, now))

    def received(self, num_tokens: int, hold_s: float, now: float) -> None:
        """A commit says that `num_tokens` had arrived, the last of them `hold_s` before it."""
        when = None
        while self._sent and self._sent[0][0] <= num_tokens:
            when = self._sent.popleft()[1]
        if when is not None:
            self._round_trip.record(max(0.0, now - when - hold_s))
