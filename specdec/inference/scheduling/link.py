"""Times between a draft worker and one target: the round trip and the target's passes, in seconds, taken from commits.

A session begins with the times that an earlier session at the same target measured. So it drafts at the right pace
before its own first commit, which takes a round trip and the computation of the prompt.
"""

from __future__ import annotations

import math
from collections import deque

from specdec.inference.request import Schedule
from specdec.inference.scheduling.waiting import schedule_for

_NUM_ROUND_TRIPS = 32
_NUM_PASSES = 15
"""Number of latest passes, the median of which counts: a mean would contain the first, which reads the prompt."""
NEAR = 2.0
"""Longest round trip, as a multiple of a pass, at which a busy target gets synchronous rounds: other sessions keep it
at work while one waits for its draft tokens."""


class Link:
    """Measured times of one session of a draft worker at a target.

    The round trip is the shortest of the latest samples, since longer ones contain queueing in the network and in
    processes.

    Args:
        earlier: times of an earlier session at the same target; None if there was none. Its round trip is used only
            until the first sample, since the network may have become slower.
    """

    def __init__(self, earlier: Link | None = None) -> None:
        self._earlier_round_trip_s = earlier.round_trip_s if earlier else 0.0
        self._round_trips_s: deque[float] = deque(maxlen=_NUM_ROUND_TRIPS)
        passes_s = [earlier.pass_s] if earlier and earlier.pass_s else []
        self._passes_s = deque(passes_s, maxlen=_NUM_PASSES)
        self._least_pass_s: float = earlier._least_pass_s if earlier else math.inf
        # (tokens sent up to the end of a message, time) of messages that no commit has acknowledged yet
        self._sent: deque[tuple[int, float]] = deque()

    @property
    def round_trip_s(self) -> float:
        """Return the round-trip time in seconds; 0 while unknown."""
        return min(self._round_trips_s, default=self._earlier_round_trip_s)

    @property
    def pass_s(self) -> float:
        """Return the lower median time of the target's latest passes, in seconds; 0 while unknown."""
        return sorted(self._passes_s)[(len(self._passes_s) - 1) // 2] if self._passes_s else 0.0

    def record_round_trip(self, seconds: float) -> None:
        self._round_trips_s.append(seconds)

    def record_pass(self, seconds: float) -> None:
        self._passes_s.append(seconds)
        self._least_pass_s = min(self._least_pass_s, seconds)

    @property
    def schedule(self) -> Schedule:
        """Return synchronous rounds if the target is near and has been busy in its latest passes, else run-ahead."""
        is_near = self.round_trip_s <= NEAR * self.pass_s
        return schedule_for(self._least_pass_s, self.pass_s) if is_near else Schedule.ASYNC

    def sent(self, num_tokens: int, now: float) -> None:
        """Record that a message was sent at `now`; with it, `num_tokens` draft tokens have been sent so far."""
        self._sent.append((num_tokens, now))

    def received(self, num_tokens: int, hold_s: float, now: float) -> None:
        """Record that a commit came at `now`, which acknowledges messages, and so shows the time of a round trip.

        Args:
            num_tokens: number of draft tokens that the target had received when it sent the commit.
            hold_s: seconds from the arrival of the last of these tokens to the sending of the commit.
            now: the present time, on the clock of `sent`.
        """
        when = None
        while self._sent and self._sent[0][0] <= num_tokens:
            when = self._sent.popleft()[1]
        if when is not None:
            self.record_round_trip(max(0.0, now - when - hold_s))
