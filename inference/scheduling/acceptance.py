"""How likely the target is to agree with the draft tokens of a session, learned from its verdicts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from inference.scheduling.pass_times import DECAY

_PRIOR_RATE = 0.8
_PRIOR_TESTED = 4.0


@dataclass(slots=True)
class Acceptance:
    """Decayed share of draft tokens that were accepted among those that were put to the test.

    A rejected token ends a proposal: what comes behind it was not tested. `prior_rate` counts as `prior_tested` further
    tokens. Evidence fades with every pass, also without a test, so a draft that was given up gets another chance.
    """

    prior_tested: float = _PRIOR_TESTED
    prior_rate: float = _PRIOR_RATE
    _tested: float = 0.0
    _accepted: float = 0.0

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Take in one pass; `num_draft_tokens` may be 0."""
        num_tested = min(num_accepted_tokens + 1, num_draft_tokens)
        self._tested = self._tested * DECAY + num_tested
        self._accepted = self._accepted * DECAY + num_accepted_tokens

    @property
    def rate(self) -> float:
        return (self._accepted + self.prior_rate * self.prior_tested) / (self._tested + self.prior_tested)
