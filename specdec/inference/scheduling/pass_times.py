"""Times of a model's passes, in seconds, by number of sessions and of draft tokens; those of old passes are dropped.

Kernels multiply several rows at once, and compiled graphs exist for few numbers of tokens. So the time of a pass rises
with its tokens in steps, not in a line, and is measured for each number of draft tokens.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

NUM_RECENT = 5
"""Number of latest passes with equally many draft tokens, the median time of which counts: some may be delayed."""
MAX_AGE = 300
"""Passes after which the times for a number of draft tokens are dropped, if no pass had that number meanwhile.

The number is then tried again. Times of fewer than NUM_RECENT passes are dropped sooner: one pass that was delayed
would keep drafts short for long. Times without draft tokens are kept.
"""
NUM_SHORT = 3
"""Most passes that are asked to have few draft tokens so as to show their cost, for each number of sessions."""
_BITS_OF_TOKENS = 4  # leading ones that count: near numbers of draft tokens are measured together from 16 on
_BITS_OF_SESSIONS = 2
"""Leading bits of a number of sessions that count. So 8 to 11 sessions share a table, which is soon full of times."""


@dataclass(slots=True)
class _Recent:
    """Latest passes that had equally many draft tokens.

    Attributes:
        seconds: their times.
        median_s: lower median of these times.
        latest: ordinal number of the latest of them among all passes that were recorded.
    """

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    median_s: float = 0.0
    latest: int = 0

    @property
    def ends(self) -> float:
        """Return the number of recorded passes, of any kind, at which these times are dropped if none is added.

        It is MAX_AGE after `latest`, and proportionally less after it for fewer than NUM_RECENT times; so it may be a
        fraction.
        """
        return self.latest + MAX_AGE * len(self.seconds) / NUM_RECENT

    def record(self, seconds: float, number: int) -> None:
        self.seconds.append(seconds)
        self.median_s = sorted(self.seconds)[(len(self.seconds) - 1) // 2]
        self.latest = number


class PassCosts:
    """Time of passes over a fixed number of sessions: a table of seconds by the pass's number of draft tokens.

    The table never falls: where more draft tokens seemed to take less time, both entries get the mean. Between measured
    entries it is interpolated, outside them constant. So a larger number of draft tokens than any that was tried looks
    cheap, and is tried as soon as so many tokens seem useful.
    """

    def __init__(self) -> None:
        self._num_passes = self._num_asked = 0
        self._recent: dict[int, _Recent] = {}
        self._table: tuple[list[int], list[float]] | None = None  # rising numbers of draft tokens, and seconds

    @property
    def is_known(self) -> bool:
        """Return whether any pass was recorded."""
        return self._num_passes > 0

    @property
    def has_slope(self) -> bool:
        """Return whether the passes show what draft tokens cost: some had at least twice as many as others."""
        return len(self._recent) > 1 and max(self._recent) >= 2 * min(self._recent)

    def covers(self, num_draft_tokens: int) -> bool:
        """Return whether a recorded pass had about `num_draft_tokens` draft tokens, or more."""
        return max(self._recent, default=-1) >= _place(num_draft_tokens)

    def asks_for_short(self) -> bool:
        """Return whether the next pass should have few draft tokens, so that a comparison shows the cost of many.

        The answer is True at most NUM_SHORT times: a pass that also verifies tokens of another source, or reads a
        prompt, does not help, and should not be asked for again and again.
        """
        if self.has_slope or not self.is_known or self._num_asked == NUM_SHORT:
            return False
        self._num_asked += 1
        return True

    def record(self, num_draft_tokens: int, seconds: float) -> None:
        """Record the time of one pass; `num_draft_tokens` is the sum over its sessions."""
        self._num_passes += 1
        self._table = None
        self._recent.setdefault(_place(num_draft_tokens), _Recent()).record(seconds, self._num_passes)

    def seconds(self, num_draft_tokens: int) -> float:
        """Return the seconds of a pass that verifies `num_draft_tokens` draft tokens; 0 while nothing is known."""
        if self._table is None:
            self._table = self._measured()
        numbers, seconds = self._table
        right = bisect.bisect_left(numbers, num_draft_tokens)
        if right == len(numbers):
            return seconds[-1] if seconds else 0.0
        if not right or numbers[right] == num_draft_tokens:
            return seconds[right]
        before, after = numbers[right - 1], numbers[right]
        share = (num_draft_tokens - before) / (after - before)
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])

    def _measured(self) -> tuple[list[int], list[float]]:
        """Drop the times of old passes, except those without draft tokens; return the table of the others.

        Returns:
            Rising numbers of draft tokens, and the seconds of a pass with each of them.
        """
        self._recent = {
            place: recent for place, recent in self._recent.items() if not place or recent.ends > self._num_passes
        }
        numbers = sorted(self._recent)
        recent = [self._recent[number] for number in numbers]
        return numbers, rising([each.median_s for each in recent], [len(each.seconds) for each in recent])


def _place(number: int, bits: int = _BITS_OF_TOKENS) -> int:
    """Return the key under which a pass is recorded: `number` with only its leading `bits` bits kept."""
    shift = max(0, number.bit_length() - bits)
    return number >> shift << shift


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the sequence nearest to `values` that never falls: isotonic regression, by pooling adjacent violators.

    Args:
        values: the numbers to approximate.
        weights: weight of each value's squared distance to its result; positive.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight and number of the values that share a result
    for value, weight in zip(values, weights, strict=True):
        pool = value, weight, 1
        while pools and pools[-1][0] > pool[0]:
            pool = _joined(pools.pop(), pool)
        pools.append(pool)
    return [value for value, _, number in pools for _ in range(number)]


def _joined(one: tuple[float, float, int], other: tuple[float, float, int]) -> tuple[float, float, int]:
    weight = one[1] + other[1]
    return (one[0] * one[1] + other[0] * other[1]) / weight, weight, one[2] + other[2]


class PassTimes:
    """Pass times by number of sessions, because one more session costs more than one more draft token does."""

    def __init__(self) -> None:
        self._by_sessions: dict[int, PassCosts] = {}
        self._tried: set[tuple[int, int]] = set()  # sessions and draft tokens, as they are recorded

    def record(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None:
        """Record the time of one pass, in seconds.

        The first pass with each pair of numbers of sessions and draft tokens is left out, since backends prepare in it.
        """
        numbers = sessions, _ = _place(num_sessions, _BITS_OF_SESSIONS), _place(num_draft_tokens)
        if numbers in self._tried:
            self._by_sessions.setdefault(sessions, PassCosts()).record(num_draft_tokens, seconds)
        self._tried.add(numbers)

    def measured(self, num_sessions: int, num_draft_tokens: int) -> float | None:
        """Return the seconds of a pass over so many sessions; None if none was recorded with so many draft tokens.

        A recorded pass with more draft tokens counts, too.
        """
        own = self._by_sessions.get(_place(num_sessions, _BITS_OF_SESSIONS))
        if own is None:
            return None
        seconds = own.seconds(num_draft_tokens)  # forgets old passes, which cover no more
        return seconds if own.covers(num_draft_tokens) else None

    def of(self, num_sessions: int) -> PassCosts:
        """Return the costs of passes over `num_sessions` sessions, or over a near number if those show too little.

        If passes over `num_sessions` do not show what draft tokens cost, but passes over another number within a factor
        of two do, the costs are those of the nearest such number. If no pass over `num_sessions` was recorded, they are
        those of the nearest number. If none was recorded at all, they are 0.
        """
        own = self._by_sessions.get(_place(num_sessions, _BITS_OF_SESSIONS))
        if own is not None and own.has_slope:
            return own
        near = [n for n, costs in self._by_sessions.items() if costs.has_slope and n <= 2 * num_sessions <= 4 * n]
        if own is not None and not near:
            return own
        nearest = min(near or self._by_sessions, key=lambda number: abs(number - num_sessions), default=None)
        return PassCosts() if nearest is None else self._by_sessions[nearest]
