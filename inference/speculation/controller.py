"""How many draft tokens are worth verifying: the arithmetic of expected tokens against measured pass times. Pure.

A target pass over W tokens takes about base + slope * W. A session whose draft is accepted with probability a per token
gains a^k tokens from the k-th draft token, and pays slope for it. Adding tokens, best first, as long as that raises
tokens per second gives the widths that maximise the throughput of the whole pass: with one session wide chains, under
load narrow ones, with a poor draft none (Leviathan et al., arXiv 2211.17192, for the expectation).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

_PRIOR_RATE = 0.8
_PRIOR_TESTED = 4.0
_DECAY = 0.98  # weight of the past per pass: about 50 passes are remembered
_MAX_MEASURED_WIDTH = 256  # prompts are read in wider passes, which say little about narrow ones


@dataclass(slots=True)
class PassCosts:
    """Decayed least squares of pass time over width; seconds and tokens."""

    _weight: float = 0.0
    _width: float = 0.0
    _time: float = 0.0
    _width_width: float = 0.0
    _width_time: float = 0.0

    def record(self, width: int, seconds: float) -> None:
        """Take in one pass over `width` tokens."""
        if width > _MAX_MEASURED_WIDTH:
            return
        self._weight = self._weight * _DECAY + 1.0
        self._width = self._width * _DECAY + width
        self._time = self._time * _DECAY + seconds
        self._width_width = self._width_width * _DECAY + width * width
        self._width_time = self._width_time * _DECAY + width * seconds

    @property
    def slope_s(self) -> float:
        """Seconds per further token; 0 while all passes had one width."""
        spread = self._weight * self._width_width - self._width**2
        if spread <= 1e-9 * self._width_width or not self._weight:
            return 0.0
        return max(0.0, (self._weight * self._width_time - self._width * self._time) / spread)

    @property
    def base_s(self) -> float:
        """Seconds of a pass before its first token; 0 while unknown."""
        if not self._weight:
            return 0.0
        return max(0.0, (self._time - self.slope_s * self._width) / self._weight)

    @property
    def pass_s(self) -> float:
        """Seconds of a pass over one token."""
        return self.base_s + self.slope_s


@dataclass(slots=True)
class Acceptance:
    """Decayed share of draft tokens that were accepted among those that were put to the test.

    A rejected token ends a proposal: what comes behind it was not tested. A prior counts as `_PRIOR_TESTED` further
    tokens. Evidence fades with every pass, also without a test, so a draft that was given up gets another chance.
    """

    _tested: float = 0.0
    _accepted: float = 0.0

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Take in one pass; `num_draft_tokens` may be 0."""
        num_tested = min(num_accepted_tokens + 1, num_draft_tokens)
        self._tested = self._tested * _DECAY + num_tested
        self._accepted = self._accepted * _DECAY + num_accepted_tokens

    @property
    def rate(self) -> float:
        return (self._accepted + _PRIOR_RATE * _PRIOR_TESTED) / (self._tested + _PRIOR_TESTED)


def choose_widths(available: Sequence[int], rates: Sequence[float], *, base_s: float, slope_s: float) -> list[int]:
    """How many draft tokens of each session to verify in one pass.

    Args:
        available: draft tokens at hand, per session of the pass.
        rates: acceptance per token, per session.
        base_s, slope_s: the pass takes base_s + slope_s * tokens.

    Returns:
        Widths that maximise expected tokens per second, each at most what is available.
    """
    widths = [0] * len(available)
    tokens = float(len(available))  # each session's own token
    seconds = base_s + slope_s * len(available)
    gains = [(-rate, i) for i, rate in enumerate(rates) if available[i]]
    heapq.heapify(gains)
    while gains:
        negative_gain, i = heapq.heappop(gains)
        if -negative_gain * seconds < slope_s * tokens:  # would lower tokens / seconds
            break
        widths[i] += 1
        tokens -= negative_gain
        seconds += slope_s
        if widths[i] < available[i]:
            heapq.heappush(gains, (negative_gain * rates[i], i))
    return widths


def waiting_pays(delay_s: float, num_tokens: int, rate: float, *, pass_s: float, slope_s: float) -> bool:
    """Whether a target without draft tokens should wait for those on their way, judged by how it would go on for ever.

    Waiting after every rejection gives rounds. Not waiting gives a pass alone for every `pass_s` of the delay, and the
    tokens that come then are of use only if they agree with those passes; if not, it goes alone again.

    Args:
        delay_s: from a rejection to the next draft tokens.
        num_tokens: how many come at once.
        rate: acceptance per token.
        pass_s, slope_s: a pass of width 1, and what every further token adds.
    """
    if not pass_s:
        return False
    tokens = sum(rate**k for k in range(num_tokens + 1))  # of a pass with a proposal
    seconds = pass_s + slope_s * num_tokens
    rejected = 1.0 - rate**num_tokens
    num_meanwhile = math.ceil(delay_s / pass_s)
    num_alone = rejected * num_meanwhile / max(rate**num_meanwhile, 1e-9)
    return tokens / (seconds + rejected * delay_s) > (tokens + num_alone) / (seconds + num_alone * pass_s)
