"""Acceptance: the probability that the target agrees with draft tokens, learned from its verdicts.

`Acceptance` is the mean acceptance rate of a session. But where a text repeats itself nearly every draft token is
accepted, and where a sentence begins few are. So `Confidence` estimates the rate of a single token, from its margin: by
how much its score exceeds that of the draft's second best token, the runner-up (compare AdaEDL, arXiv 2410.18351).
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from specdec.inference.model.proposer import DraftToken

_PRIOR_RATE = 0.8  # of a session, and of tokens without a margin
_PRIOR_TESTED = 4.0
_DECAY = 0.98  # weight of the past at each pass: about 50 passes count
_EDGES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # nats of lead
_PRIOR_TESTED_OF_GROUP = 8.0
_DECAY_OF_GROUP = 0.995  # weight of the past at each verdict of a group: about 200 verdicts count


@dataclass(slots=True)
class Acceptance:
    """Share of the tested draft tokens that were accepted; recent passes weigh most.

    A rejected token ends a proposal, so the tokens after it are not tested. The weight of old tests falls with every
    pass, also with one that tests nothing. So a draft whose tokens are no longer verified gets another chance.

    Attributes:
        prior_tested, prior_rate: the estimate is always as if so many further tokens had been tested, and this share of
            them accepted.
        decay: weight of all earlier tests at each pass.
        tested, accepted: weighted numbers of tokens; what they begin with fades.
    """

    prior_tested: float = _PRIOR_TESTED
    prior_rate: float = _PRIOR_RATE
    decay: float = _DECAY
    tested: float = 0.0
    accepted: float = 0.0

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Record how many draft tokens a pass verified, possibly 0, and how many of them the target accepted."""
        num_tested = min(num_accepted_tokens + 1, num_draft_tokens)
        self.tested = self.tested * self.decay + num_tested
        self.accepted = self.accepted * self.decay + num_accepted_tokens

    @property
    def rate(self) -> float:
        return (self.accepted + self.prior_rate * self.prior_tested) / (self.tested + self.prior_tested)


def expected_tokens(rate: float, number: int) -> float:
    """Return how many of `number` draft tokens are accepted on average, up to the first one that is rejected.

    Args:
        rate: probability that a token is accepted if all before it were; below 1.
        number: number of draft tokens in a row.
    """
    return rate * (1.0 - rate**number) / (1.0 - rate)


class Confidence:
    """Acceptance rate of a draft token by its margin: one estimate for each group of similar margins.

    An estimate begins at the logistic function of the group's margin, and follows the verdicts.
    """

    def __init__(self) -> None:
        tested, priors = _PRIOR_TESTED_OF_GROUP, map(_prior_rate, range(len(_EDGES) + 2))
        self._groups = [Acceptance(0.0, 0.0, _DECAY_OF_GROUP, tested, tested * prior) for prior in priors]

    def rate(self, token: DraftToken) -> float:
        """Return the probability that the target chooses this token, given that it chose all tokens before it."""
        return self._groups[_group(token)].rate

    def record(self, token: DraftToken, *, accepted: bool) -> None:
        """Record whether the target accepted a token; call this only if it accepted all tokens before it."""
        self._groups[_group(token)].record(1, int(accepted))


def _group(token: DraftToken) -> int:
    """Return the number of the group of a token's margin; tokens without a runner-up are in the last group."""
    return len(_EDGES) + 1 if math.isinf(token.margin) else bisect.bisect(_EDGES, token.margin)


def _prior_rate(group: int) -> float:
    """Return the first estimate of the acceptance rate of tokens with similar margins, the group of this number.

    It is 1 / (1 + exp(-margin)), or a constant for tokens without a runner-up.
    """
    if group > len(_EDGES):
        return _PRIOR_RATE
    return 1.0 / (1.0 + math.exp(-_EDGES[min(group, len(_EDGES) - 1)]))
