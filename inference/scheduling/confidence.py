"""How likely the target is to agree with a draft token, judged by how sure the draft was of it. Pure.

A draft is far better calibrated than its mean acceptance tells: in text that repeats it is right about everything, at
the begin of a new sentence about nothing. So the lead of its token over the runner-up, learned from verdicts, says how
far ahead drafting pays (after the confidence-based stopping rules of e.g. AdaEDL, arXiv 2410.18351).
"""

from __future__ import annotations

import bisect
import math

from inference.model.proposer import DraftToken

_EDGES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # nats of lead
_PRIOR_TESTED = 8.0
_DECAY = 0.995  # weight of the past per verdict of a group: about 200 are remembered
_UNKNOWN_RATE = 0.8  # of tokens whose lead was not asked for


class Confidence:
    """Acceptance by margin, one estimate per group of margins; starts from a logistic guess."""

    def __init__(self) -> None:
        self._tested = [_PRIOR_TESTED] * (len(_EDGES) + 2)
        self._accepted = [_PRIOR_TESTED * _prior_rate(group) for group in range(len(_EDGES) + 2)]

    def rate(self, token: DraftToken) -> float:
        """Probability that the target chooses this token, if it agrees with all before it."""
        group = _group(token)
        return self._accepted[group] / self._tested[group]

    def record(self, token: DraftToken, *, accepted: bool) -> None:
        """Take in a verdict on a token behind which everything was agreed."""
        group = _group(token)
        self._tested[group] = self._tested[group] * _DECAY + 1.0
        self._accepted[group] = self._accepted[group] * _DECAY + accepted


def _group(token: DraftToken) -> int:
    """Which margins are judged together; the last group holds tokens without one."""
    return len(_EDGES) + 1 if math.isinf(token.margin) else bisect.bisect(_EDGES, token.margin)


def _prior_rate(group: int) -> float:
    """From even odds upwards: 1 / (1 + exp(-margin))."""
    if group > len(_EDGES):
        return _UNKNOWN_RATE
    return 1.0 / (1.0 + math.exp(-_EDGES[min(group, len(_EDGES) - 1)]))
