"""Parts of prompts: how many prompt tokens a pass reads while other sessions decode in it.

Reading a part of a prompt makes a pass longer for the sessions that decode in it. If a part takes as long as `share`
passes that only decode, those sessions get a token in 1 + share times the usual time, and the prompt takes 1 + 1 /
share times as long as without them. The idea is from Sarathi-Serve (arXiv 2403.02310), but here the budget is measured
time instead of a number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_PART_TOKENS = 256
"""Longest part of a prompt in one pass, unless the backend sets one; it bounds the wait of a new request."""
SHORT_PART_TOKENS, USUAL_PART_TOKENS = 8, 16
"""The two lengths of the shortest parts, in tokens, used where `PromptParts.share` would allow still less.

Attention of a backend may take nearly as long for 8 tokens as for 16 (onnx far into a prompt: 14 and 17 ms); then the
usual length is taken. Where it does not (torch), the short length is: the other sessions wait half as long, and the
prompt takes little longer.
"""
MAX_LOSS = 1.5
"""Time per prompt token in passes with short parts, as a multiple of that with usual parts, above which short parts are
not taken."""
STEP_TOKENS = 8
DECAY = 0.7  # weight of the past at each part; a low one, since a token costs more at later positions


@dataclass(slots=True)
class PromptParts:
    """Measured cost of reading prompt tokens, and the rule how many of them a pass may read.

    Attributes:
        share: longest time that reading may add to a pass in which other sessions decode, as a multiple of that pass.
    """

    share: float
    _num_tokens: float = 0.0
    _seconds: float = 0.0
    _known: dict[int, float] = field(default_factory=dict)
    """Recent seconds of a part, by each of the two shortest lengths.

    Times grow with the position, so the time of the unused length is soon too low, and that length is tried again.
    """

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record that reading `num_tokens` prompt tokens took a pass of `seconds`, or made one longer by `seconds`."""
        self._num_tokens = self._num_tokens * DECAY + num_tokens
        seconds = max(0.0, seconds)
        self._seconds = self._seconds * DECAY + seconds
        if num_tokens in (SHORT_PART_TOKENS, USUAL_PART_TOKENS):
            self._known[num_tokens] = DECAY * self._known.get(num_tokens, seconds) + (1 - DECAY) * seconds

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds that reading `num_tokens` prompt tokens should add to a pass; 0 while unknown."""
        return num_tokens * self._seconds / self._num_tokens if self._num_tokens else 0.0

    def room(self, pass_s: float) -> int:
        """Return how many prompt tokens a pass in which sessions decode may read.

        That is MAX_PART_TOKENS while times are unknown.

        Args:
            pass_s: seconds of the pass without prompt tokens; 0 while unknown.
        """
        if not self._seconds or not pass_s:
            return MAX_PART_TOKENS
        num_tokens = self.share * pass_s * self._num_tokens / self._seconds
        return max(self._least(pass_s), min(MAX_PART_TOKENS, int(num_tokens) // STEP_TOKENS * STEP_TOKENS))

    def _least(self, pass_s: float) -> int:
        """Return the shortest part, in tokens: the short length, or the usual one if it is far cheaper per token.

        A length whose time was not measured comes first, so that it gets measured.
        """
        per_token = {}
        for number in (USUAL_PART_TOKENS, SHORT_PART_TOKENS):
            if (seconds := self._known.get(number)) is None:
                return number
            per_token[number] = (pass_s + seconds) / number
        is_dear = per_token[SHORT_PART_TOKENS] > MAX_LOSS * per_token[USUAL_PART_TOKENS]
        return USUAL_PART_TOKENS if is_dear else SHORT_PART_TOKENS
