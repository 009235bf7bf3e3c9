"""Retry budget of a process, shared by all of its requests.

Many requests that retry at once make the state of a failing server worse. gRPC (proposal A6) and Envoy allow retries
only while enough of all calls succeed. Here a request without budget waits instead, since waiting costs a client less
than an error. Each resume, which continues an answer at another server, takes one unit of the budget, called a token.
The token comes back when the resume gives new output, so successful resumes are free. A server that recovers gets at
most `SIZE` resumes at first; one that keeps failing gets `PER_S` a second.
"""

from __future__ import annotations

SIZE = 32
"""Tokens of a full budget: most resumes that can begin at once, as when a server is lost."""
PER_S = 4.0
"""Tokens that the budget regains per second, whether or not the resumes that spent them succeeded."""


class RetryBudget:
    """Retry budget of one process. All times must be seconds of the same clock."""

    def __init__(self) -> None:
        self._tokens = float(SIZE)
        self._at = 0.0

    def take(self, now: float, *, spare: float = 0.0) -> bool:
        """Take a token from the budget and return True; take none and return False if fewer than `spare` would be left.

        Args:
            now: the present time, in seconds.
            spare: tokens that must stay in the budget.
        """
        self._tokens = min(SIZE, self._tokens + PER_S * max(0.0, now - self._at))
        self._at = now
        if self._tokens < 1.0 + spare:
            return False
        self._tokens -= 1.0
        return True

    def give_back(self) -> None:
        """Put a token back, after a resume has given new output."""
        self._tokens = min(SIZE, self._tokens + 1.0)
