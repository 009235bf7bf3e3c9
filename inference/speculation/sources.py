"""Sources of a session's draft tokens: a draft model and the session's own tokens, with what each has been worth."""

from __future__ import annotations

from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.scheduling.acceptance import Acceptance
from specdec.inference.scheduling.pass_times import PassCosts
from specdec.inference.scheduling.waiting import Arrivals, wait_s
from specdec.inference.speculation.lookup import Lookup

_OWN_WEIGHT = 0.25  # of the newest pass without tokens of a draft model


class Sources:
    """Estimates for one session at a target, learned from its verdicts.

    Attributes:
        arrivals: arrivals of the draft model's tokens.
        lookup: lookup in the session's own tokens.
    """

    def __init__(self) -> None:
        self.arrivals, self.lookup = Arrivals(), Lookup()
        self._acceptance = Acceptance()
        self._num_own = 1.0  # recent mean of tokens of a pass without a draft model's: lookup or a grammar adds some

    def rate(self, turn: Turn) -> float:
        """Return the probability that the target accepts a token that the turn proposes."""
        return self.lookup.rate if turn.lookup else self._acceptance.rate

    def wait_s(self, costs: PassCosts, *, now: float, ready_s: float) -> float:
        """Return the seconds for which waiting for the draft model's tokens pays; see `waiting.wait_s`."""
        rate = self._acceptance.rate
        return wait_s(self.arrivals, rate, costs, now=now, ready_s=ready_s, num_own=self._num_own)

    def record(self, verdict: Verdict, ended: float) -> None:
        """Record the verdict of a pass that ended at monotonic second `ended`, for each source apart."""
        num_draft_tokens, num_accepted_tokens = verdict.of_draft
        self._acceptance.record(num_draft_tokens, num_accepted_tokens)
        self.arrivals.committed(ended, all_accepted=num_accepted_tokens == num_draft_tokens)
        self.lookup.record(verdict.own.num_lookup_tokens, verdict.own.num_lookup_accepted)
        if not num_draft_tokens:
            self._num_own += _OWN_WEIGHT * (len(verdict.token_ids) - self._num_own)
