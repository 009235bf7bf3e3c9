"""How often a process may ask again, all of its requests together.

A server that fails is not helped by everybody who tries again at once. gRPC (proposal A6) and Envoy let retries go on
only while enough of all calls succeed. Here a request that waits loses less than one that is refused, so a spent budget
means waiting: a token is spent on each resume, and comes back when the resume gives a commit. Whoever succeeds is thus
free, a server that comes back is met by a few first, and one that goes on failing by `PER_S` a second. Pure.
"""

from __future__ import annotations

SIZE = 32
"""Resumes that may be under way at once: those of a usual process."""
PER_S = 4.0
"""Tokens a second that come back by themselves."""


class RetryBudget:
    """Tokens of one process; times are in seconds of any one clock."""

    def __init__(self) -> None:
        self._tokens = float(SIZE)
        self._at = 0.0

    def take(self, now: float, *, spare: float = 0.0) -> bool:
        """Spend a token; False if there is none above those that are to be spared for others."""
        self._tokens = min(SIZE, self._tokens + PER_S * max(0.0, now - self._at))
        self._at = now
        if self._tokens < 1.0 + spare:
            return False
        self._tokens -= 1.0
        return True

    def give_back(self) -> None:
        """A resume has come further."""
        self._tokens = min(SIZE, self._tokens + 1.0)
