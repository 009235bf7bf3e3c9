"""How many draft tokens are worth verifying: the arithmetic of expected tokens against measured pass times. Pure.

A target pass with W draft tokens takes about base + slope * W. A session whose draft is accepted with probability a per
token gains a^k tokens from the k-th draft token, and pays slope for it. Adding tokens, best first, as long as that
raises tokens per second gives the widths that maximise the throughput of the whole pass: with one session wide chains,
under load narrow ones, with a poor draft none (Leviathan et al., arXiv 2211.17192, for the expectation).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

_PRIOR_RATE = 0.8
_PRIOR_TESTED = 4.0
_DECAY = 0.98  # weight of the past per pass: about 50 passes are remembered


@dataclass(slots=True)
class PassCosts:
    """Decayed least squares of pass time over draft tokens, for passes over one number of sessions."""

    _weight: float = 0.0
    _width: float = 0.0
    _time: float = 0.0
    _width_width: float = 0.0
    _width_time: float = 0.0

    def record(self, num_draft_tokens: int, seconds: float) -> None:
        """Take in one pass that verified so many draft tokens, of all its sessions together."""
        width = num_draft_tokens
        self._weight = self._weight * _DECAY + 1.0
        self._width = self._width * _DECAY + width
        self._time = self._time * _DECAY + seconds
        self._width_width = self._width_width * _DECAY + width * width
        self._width_time = self._width_time * _DECAY + width * seconds

    @property
    def slope_s(self) -> float:
        """Seconds per draft token; 0 while all passes had the same number of them."""
        spread = self._weight * self._width_width - self._width**2
        if spread <= 1e-9 * self._width_width or not self._weight:
            return 0.0
        return max(0.0, (self._weight * self._width_time - self._width * self._time) / spread)

    @property
    def base_s(self) -> float:
        """Seconds of a pass without draft tokens; 0 while unknown."""
        if not self._weight:
            return 0.0
        return max(0.0, (self._time - self.slope_s * self._width) / self._weight)


class PassTimes:
    """Pass times by number of sessions. A session more costs other than a draft token more: attention, for one."""

    def __init__(self) -> None:
        self._by_sessions: dict[int, PassCosts] = {}

    def record(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None:
        """Take in one pass. The first over so many sessions says nothing: a backend prepares for the later ones."""
        if num_sessions not in self._by_sessions:
            self._by_sessions[num_sessions] = PassCosts()
        else:
            self._by_sessions[num_sessions].record(num_draft_tokens, seconds)

    def of(self, num_sessions: int) -> PassCosts:
        """For passes over so many sessions, or the nearest number that was seen; nothing is known before."""
        known = [number for number, costs in self._by_sessions.items() if costs.base_s]
        if not known:
            return PassCosts()
        return self._by_sessions[min(known, key=lambda number: abs(number - num_sessions))]


@dataclass(slots=True)
class Acceptance:
    """Decayed share of draft tokens that were accepted among those that were put to the test.

    A rejected token ends a proposal: what comes behind it was not tested. A prior counts as `prior_tested` further
    tokens. Evidence fades with every pass, also without a test, so a draft that was given up gets another chance.
    """

    prior_tested: float = _PRIOR_TESTED
    _tested: float = 0.0
    _accepted: float = 0.0

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Take in one pass; `num_draft_tokens` may be 0."""
        num_tested = min(num_accepted_tokens + 1, num_draft_tokens)
        self._tested = self._tested * _DECAY + num_tested
        self._accepted = self._accepted * _DECAY + num_accepted_tokens

    @property
    def rate(self) -> float:
        return (self._accepted + _PRIOR_RATE * self.prior_tested) / (self._tested + self.prior_tested)


def choose_widths(available: Sequence[int], rates: Sequence[float], *, base_s: float, slope_s: float) -> list[int]:
    """How many draft tokens of each session to verify in one pass.

    Args:
        available: draft tokens at hand, per session of the pass.
        rates: acceptance per token, per session.
        base_s, slope_s: the pass takes base_s + slope_s * draft tokens.

    Returns:
        Widths that maximise expected tokens per second, each at most what is available.
    """
    widths = [0] * len(available)
    tokens = float(len(available))  # each session's own token
    seconds = base_s
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
        pass_s, slope_s: a pass without draft tokens, and what each of them adds.
    """
    if not pass_s:
        return False
    tokens = sum(rate**k for k in range(num_tokens + 1))  # of a pass with a proposal
    seconds = pass_s + slope_s * num_tokens
    rejected = 1.0 - rate**num_tokens
    num_meanwhile = math.ceil(delay_s / pass_s)
    num_alone = rejected * num_meanwhile / max(rate**num_meanwhile, 1e-9)
    return tokens / (seconds + rejected * delay_s) > (tokens + num_alone) / (seconds + num_alone * pass_s)
