"""Passes of the target, and the periods of quiet passes: those during which no draft worker computed.

The period of a pass is the time from its start to the start of the next one, in seconds. It contains waits, messages,
and whatever drafting takes from a core, a bus or a lock that the target needs too. Quiet passes show what the same
tokens would have cost without drafts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

NUM_QUIET = 8
"""Number of latest passes without drafting, for each number of sessions, of whose times the median counts."""
MIN_QUIET = 4
"""Fewest passes without drafting whose median time is used."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the target, up to the start of the next one.

    Attributes:
        num_sessions: sessions that decode, in the pass or not.
        num_plain: passes, counted once for each session in them, that decoding without a draft model would have taken
            for this pass's tokens; fewer than tokens if prompt lookup would have found some of them.
        num_draft_tokens: draft tokens that were verified, those that the target proposed included.
        num_prompt_tokens: prompt tokens that were read.
        has_drafts: whether tokens of a draft model were verified.
        seconds: time to the start of the next pass.
    """

    num_sessions: int
    num_plain: float
    num_draft_tokens: int
    num_prompt_tokens: int
    has_drafts: bool
    seconds: float = 0.0


class Quiet:
    """Times of passes during which no draft worker computed, by number of sessions, and the time per prompt token."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}  # by half octaves of the number of sessions
        self._prompts: deque[tuple[float, int]] = deque(maxlen=8 * NUM_QUIET)  # seconds of a prompt token; tokens
        self._prompt_s = 0.0

    def record(self, each: Pass) -> None:
        """Record a quiet pass, during which no draft worker computed.

        If passes over its number of sessions have become slower or faster, the times for all other numbers change by
        the same factor, since the same cause probably affects them too. A pass that read prompt tokens counts
        only for the time per prompt token.
        """
        plain_s = self.period(each.num_sessions)
        if each.num_prompt_tokens:
            if plain_s is not None:
                self._prompts.append(((each.seconds - plain_s) / each.num_prompt_tokens, each.num_prompt_tokens))
                self._prompt_s = max(0.0, _median(self._prompts))
            return
        key = _half_octave(each.num_sessions)
        recent = self._recent.setdefault(key, deque(maxlen=NUM_QUIET))
        before_s = statistics.median(recent) if len(recent) >= MIN_QUIET else None
        recent.append(each.seconds)
        if before_s:
            change = statistics.median(recent) / before_s
            for other in self._recent.values():
                if other is not recent:
                    other.extend([seconds * change for seconds in other])

    def period(self, num_sessions: int) -> float | None:
        """Return the seconds from the start of a pass without drafting over so many sessions to that of the next one.

        Where too few passes over this number were recorded, the result follows from the nearest known numbers; it is
        None if there is none within a factor of about three.
        """
        key = _half_octave(num_sessions)
        if len(own := self._recent.get(key, ())) >= MIN_QUIET:
            return statistics.median(own)
        known = [each for each, recent in self._recent.items() if len(recent) >= MIN_QUIET and abs(each - key) <= 3]
        below = max((each for each in known if each < key), default=None)
        above = min((each for each in known if each > key), default=None)
        if below is not None and above is not None:
            low_s, high_s = (statistics.median(self._recent[each]) for each in (below, above))
            return low_s + (max(low_s, high_s) - low_s) * (key - below) / (above - below)  # more take no less time
        near = below if above is None else above
        if near is None:
            return None
        return statistics.median(self._recent[near]) * 2 ** ((key - near) / 4)  # some time is shared by all

    def plain_s(self, each: Pass) -> float | None:
        """Return the seconds that a pass's tokens would have taken without a draft model; None if that is not known."""
        period_s = self.period(each.num_sessions)
        if period_s is None or (each.num_prompt_tokens and not self._prompts):
            return None
        return each.num_plain / each.num_sessions * period_s + each.num_prompt_tokens * self._prompt_s


def _median(parts: Iterable[tuple[float, int]]) -> float:
    """Return the median seconds of a prompt token, each part weighed by its number of tokens.

    A part of few tokens takes less time than periods vary: what it seems to add to its pass is mostly chance.

    Args:
        parts: of each part of a prompt, the seconds that it added to a pass for each token, and its number of tokens.
    """
    ordered = sorted(parts)
    middle = sum(num_tokens for _, num_tokens in ordered) / 2
    ends = itertools.accumulate(num_tokens for _, num_tokens in ordered)
    return next(seconds for (seconds, _), end in zip(ordered, ends, strict=True) if end >= middle)


def _half_octave(num_sessions: int) -> int:
    """Return twice the binary logarithm of a number, rounded: the key of numbers of sessions that share periods."""
    return round(2 * math.log2(num_sessions))
