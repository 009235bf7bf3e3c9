"""Sources of a session's draft tokens, a draft worker and prompt lookup, and estimates of how much they save."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.scheduling.acceptance import Acceptance, expected_tokens
from specdec.inference.scheduling.pass_times import PassCosts
from specdec.inference.scheduling.waiting import Arrivals, wait_s
from specdec.inference.speculation.lookup import Lookup
from specdec.inference.speculation.replay import Replay
from specdec.inference.speculation.tree import Branch, DraftTree

_OWN_WEIGHT = 0.25  # of the newest pass without tokens of a draft model


class Sources:
    """Draft tokens of one session at a target, and estimates of how many are accepted, learned from its passes.

    Args:
        committed: the session's token ids; the session appends to this list before it calls `tree.commit`.
        lookup: prompt lookup in the session's own tokens and in other texts that its output may repeat; None: in its
            own tokens alone.
        lookup_limit: most tokens that decoding without a draft model looks up for a pass.

    Attributes:
        tree: tokens of the draft worker that may still be accepted.
        arrivals: arrivals of the draft worker's messages.
        replay: the prompt lookup, with a count of the passes that decoding with it alone, without a draft model, would
            have taken.
        num_plain: number of passes that decoding without a draft model would have taken for the tokens of the latest
            pass.
        last_at: time of the draft worker's latest message, in monotonic seconds.
        step_us: microseconds of a step of the draft worker's model, as its latest message said; 0 if unknown.
    """

    def __init__(self, committed: Sequence[int], lookup: Lookup | None = None, lookup_limit: int = 0) -> None:
        self._committed = committed
        self.replay = Replay(committed, lookup or Lookup(own_limit=lookup_limit), lookup_limit)
        self.num_plain = 0.0
        self.last_at = 0.0
        self.follow()
        self._acceptance = Acceptance()
        self._num_own = 1.0  # recent mean of tokens of a pass without a draft model's: lookup or a grammar adds some

    def follow(self) -> None:
        """Drop the draft worker's tokens, and begin the measurement of arrivals anew, before another worker begins."""
        self.tree, self.arrivals = DraftTree(self._committed), Arrivals()
        self.step_us = 0
        self._num_acknowledged = 0  # draft tokens reported as received

    def grow(self, branches: Sequence[Branch]) -> None:
        """Add a draft worker's branches to the draft tree.

        Raises:
            InvalidRequestError: a branch is not valid, see `Branch.check`.
        """
        self.last_at, num_live = time.monotonic(), len(self.tree)
        for branch in branches:
            self.tree.grow(branch)
            self.step_us = branch.step_us
        if len(self.tree) > num_live:  # others continue a rejected chain, and show nothing of the new one's delay
            self.arrivals.proposed(self.last_at, len(self.tree) - num_live)

    def acknowledged(self, ended: float) -> tuple[int, int]:
        """Return what a commit reports to the draft worker about its messages.

        Args:
            ended: end of the commit's pass, in monotonic seconds.

        Returns:
            The number of draft tokens received so far, and the microseconds from the last message to `ended`; (0, 0)
            if none came since the previous call.
        """
        num_received = self.tree.num_numbers
        if num_received == self._num_acknowledged:
            return 0, 0
        self._num_acknowledged = num_received
        return num_received, max(0, round((ended - self.last_at) * 1e6))

    @property
    def draft_rate(self) -> float:
        """Return the probability that the target accepts a token of the draft worker, if it accepted all before it."""
        return self._acceptance.rate

    @property
    def lookup(self) -> Lookup:
        """Return the prompt lookup of the session."""
        return self.replay.lookup

    def preferred(self, limit: int, num_draft_tokens: int) -> list[int]:
        """Return up to `limit` tokens from prompt lookup if more of them should be accepted than of a draft model's.

        Otherwise the result is empty.

        Args:
            limit: most tokens to return.
            num_draft_tokens: number of the draft model's tokens that the pass would verify instead.
        """
        found = self.replay.propose(limit)
        pays = expected_tokens(self.lookup.rate, len(found)) >= expected_tokens(self.draft_rate, num_draft_tokens)
        return found if pays else []

    def rate(self, turn: Turn) -> float:
        """Return the probability that the target accepts a token that the turn proposes."""
        return self.lookup.rate if turn.lookup else self.draft_rate

    def wait_s(self, costs: PassCosts, *, now: float, ready_s: float) -> float:
        """Return for how many more seconds the pass should wait for the draft worker's tokens; 0 or less: not at all.

        Args:
            costs: costs of passes over this session alone.
            now: the present time, in monotonic seconds.
            ready_s: seconds for which the session could have been in a pass.
        """
        rate = self._acceptance.rate
        return wait_s(self.arrivals, rate, costs, now=now, ready_s=ready_s, num_own=self._num_own)

    def record(self, verdict: Verdict, ended: float, *, lookup_share: float = 1.0, has_grammar: bool = False) -> None:
        """Record a pass's verdict, separately for the draft worker's tokens and looked-up ones.

        Args:
            verdict: the verdict; its tokens are appended to `committed` already.
            ended: end of the pass, in monotonic seconds.
            lookup_share: share of looked-up tokens that passes without a draft model verify.
            has_grammar: True if a grammar may force tokens, which decoding without a draft model gets too.
        """
        num_draft_tokens, num_accepted_tokens = verdict.of_draft
        self._acceptance.record(num_draft_tokens, num_accepted_tokens)
        self.arrivals.committed(ended, all_accepted=num_accepted_tokens == num_draft_tokens)
        num_tokens, own = len(verdict.token_ids), verdict.own
        if not num_draft_tokens:
            self._num_own += _OWN_WEIGHT * (num_tokens - self._num_own)
        looked_up = None if num_draft_tokens else (own.num_lookup_tokens, own.num_lookup_accepted)
        self.num_plain = self.replay.record(num_tokens, looked_up, lookup_share)
        if has_grammar:
            self.replay.skip()
            self.num_plain = num_tokens / self._num_own if num_draft_tokens else 1.0
