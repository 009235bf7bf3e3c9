"""Parts of prompts: how many prompt tokens a pass reads while other sessions decode in it. Pure.

A pass that decodes takes `pass_s`. Reading adds to it, and every decoding session waits for both. With parts that take
`share` passes, others see gaps of 1 + share passes, and a prompt takes 1 + 1 / share times as long as alone.
(Sarathi-Serve, arXiv 2403.02310, has the idea; here the budget is measured time, not a number of tokens.)
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_PART_TOKENS = 256
"""Longest part of a prompt in one pass, also where no other session decodes: a newcomer waits for it."""
MIN_PART_TOKENS = 16
"""Shortest part: shorter ones cost nearly as much."""
STEP_TOKENS = 8
DECAY = 0.7  # weight of the past per part: a token costs more at later positions


@dataclass(slots=True)
class PromptParts:
    """Measured cost of reading, and the room for prompt tokens in a pass.

    Attributes:
        share: time that reading may add to a pass in which others decode, in passes.
    """

    share: float
    _num_tokens: float = 0.0
    _seconds: float = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record that reading `num_tokens` prompt tokens took, or added to a pass, so many seconds."""
        self._num_tokens = self._num_tokens * DECAY + num_tokens
        self._seconds = self._seconds * DECAY + max(0.0, seconds)

    def room(self, pass_s: float) -> int:
        """Return how many prompt tokens a pass may read beside decoding sessions, a multiple of STEP_TOKENS.

        Args:
            pass_s: seconds of the pass without them; 0 while unknown.
        """
        if not self._seconds or not pass_s:
            return MAX_PART_TOKENS
        num_tokens = self.share * pass_s * self._num_tokens / self._seconds
        return max(MIN_PART_TOKENS, min(MAX_PART_TOKENS, int(num_tokens) // STEP_TOKENS * STEP_TOKENS))
