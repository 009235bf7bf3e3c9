"""Parts of prompts: how many prompt tokens a pass reads while other sessions decode in it. Pure.

Reading a part of a prompt makes a pass longer, and the sessions that decode in it wait. If a part takes as long
as `share` passes that only decode, those sessions get tokens every 1 + share passes, and the prompt takes 1 + 1 / share
times as long as without them. The idea is from Sarathi-Serve (arXiv 2403.02310), but here the budget is measured time
instead of a number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_PART_TOKENS = 256
"""Longest part of a prompt in one pass, also where no session decodes, since a new request waits for the pass."""
MIN_PART_TOKENS = 16
"""Shortest part: shorter ones cost nearly as much."""
STEP_TOKENS = 8
DECAY = 0.7  # weight of the past at each part; a low one, since a token costs more at later positions


@dataclass(slots=True)
class PromptParts:
    """Measured cost of reading prompt tokens, and the number of them that a pass has room for.

    Attributes:
        share: longest time that reading may add to a pass in which others decode, as a multiple of that pass.
    """

    share: float
    _num_tokens: float = 0.0
    _seconds: float = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record that reading `num_tokens` prompt tokens took `seconds`, or made a pass longer by them."""
        self._num_tokens = self._num_tokens * DECAY + num_tokens
        self._seconds = self._seconds * DECAY + max(0.0, seconds)

    def room(self, pass_s: float) -> int:
        """Return how many prompt tokens a pass may read beside decoding sessions, a multiple of STEP_TOKENS.

        Args:
            pass_s: seconds of the pass without prompt tokens; 0 while unknown.
        """
        if not self._seconds or not pass_s:
            return MAX_PART_TOKENS
        num_tokens = self.share * pass_s * self._num_tokens / self._seconds
        return max(MIN_PART_TOKENS, min(MAX_PART_TOKENS, int(num_tokens) // STEP_TOKENS * STEP_TOKENS))
