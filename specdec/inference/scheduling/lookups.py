"""Rule whether the next pass should use prompt lookup, by how many of the tokens found recent passes verified.

Prompt lookup takes draft tokens from an earlier occurrence of the text's last tokens. It takes some hundredths of a
millisecond for each session. Where many sessions decode together, a further token of a pass may cost as much as it
gains, so that passes verify none of the tokens found, and lookups only cost time.
"""

from __future__ import annotations

SHARE_WEIGHT = 0.05
"""Weight of the newest pass in `Lookups.share`, an exponentially weighted mean."""
SESSIONS_PER_PASS = 4
"""Divisor of the longest pause: lookups pause for at most the number of decoding sessions over this, in passes."""


class Lookups:
    """Rule whether an engine's sessions look up draft tokens, except in texts that an answer is expected to repeat.

    Attributes:
        share: share of the tokens found by lookup that recent passes without tokens of a draft model verified; a pass
            does not verify tokens that would cost more time than they save.
    """

    def __init__(self) -> None:
        self.share, self._pause, self._num_left = 1.0, 0, 0

    @property
    def are_due(self) -> bool:
        """Return whether sessions should look tokens up for the next pass."""
        return self._num_left == 0

    def passed(self, num_sessions: int, num_found: int, num_verified: int) -> None:
        """Record a pass; after one that verified none of the tokens found, lookups pause for some passes.

        Args:
            num_sessions: number of sessions that decoded.
            num_found: number of tokens that lookup found for the pass; 0 if it verified tokens of a draft model.
            num_verified: number of the tokens found that the pass verified.
        """
        if not self.are_due:
            self._num_left -= 1
        elif num_found:
            self.share += SHARE_WEIGHT * (num_verified / num_found - self.share)
            self._pause = 0 if num_verified else min(2 * self._pause + 1, num_sessions // SESSIONS_PER_PASS)
            self._num_left = self._pause
