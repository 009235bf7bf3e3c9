"""Worth of prompt lookup: how much of what it finds passes verify, and whether the next pass should look tokens up.

A lookup takes some hundredths of a millisecond for each session. Where many sessions decode together, a further token
of a pass may cost as much as it gains, so that passes verify none of what is found, and lookups only cost time.
"""

from __future__ import annotations

SHARE_WEIGHT = 0.05
"""Weight of the newest pass in `Lookups.share`."""
SESSIONS_PER_PASS = 4
"""Sessions that decode for each pass without lookups, at most, after a pass that verified none of what was found."""


class Lookups:
    """Lookups of an engine's sessions, apart from those in texts that an answer is expected to repeat.

    Attributes:
        share: share of the tokens found that was verified in recent passes without tokens of a draft model; a pass
            leaves out found tokens that would cost more time than they save.
    """

    def __init__(self) -> None:
        self.share, self._pause, self._num_left = 1.0, 0, 0

    @property
    def are_due(self) -> bool:
        """Return whether sessions should look tokens up for the next pass."""
        return self._num_left == 0

    def passed(self, num_sessions: int, num_found: int, num_verified: int) -> None:
        """Record a pass.

        Args:
            num_sessions: sessions that decoded.
            num_found: tokens found for the pass; 0 if it verified tokens of a draft model.
            num_verified: number of these that it verified.
        """
        if not self.are_due:
            self._num_left -= 1
        elif num_found:
            self.share += SHARE_WEIGHT * (num_verified / num_found - self.share)
            self._pause = 0 if num_verified else min(2 * self._pause + 1, num_sessions // SESSIONS_PER_PASS)
            self._num_left = self._pause
