"""Number of draft tokens before each pass of the target, where draft and target take turns in one process.

Every draft token costs a step of the draft and makes the pass of the target wider by one token. It gains one token if
the target accepts it and all draft tokens before it. Drafting goes on while one more draft token, or a few more, can
raise the expected tokens per second. A few may pay where one does not, since passes of several widths take equally
long. Transformers and llama.cpp stop at a fixed probability instead.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.inference.model.decoder import Turn
from specdec.inference.model.proposer import DraftToken
from specdec.inference.scheduling.acceptance import Acceptance, Confidence
from specdec.inference.scheduling.pass_times import PassCosts, PassTimes
from specdec.inference.scheduling.throughput import fastest

FIRST_LENGTH = 4
"""Draft tokens per session and pass while no times are measured: a long wrong draft costs more than short ones lose."""
LOOKED_AHEAD = 6
"""Most further draft tokens that are considered together, since several may pay where one does not."""
_PRIOR_TESTED = 1.0  # less than in other schedules: here every useless token delays the pass


@dataclass(slots=True)
class Chain:
    """Draft tokens of one session before a pass, to which steps of the draft add, with the gain that they promise.

    Attributes:
        turn: the session's turn in the pass.
        room: most tokens that the chain may have; 0 once it grows no more.
        tokens: the draft tokens so far.
        num_seen: number of the first tokens that the fields below describe.
        last: probability that the last of these is accepted if all before it are; None if there is none.
        survival: probability that all of these are accepted.
        gain: expected number of these that are accepted.
    """

    turn: Turn
    room: int
    tokens: list[DraftToken] = field(default_factory=list)
    num_seen: int = 0
    last: float | None = None
    survival: float = 1.0
    gain: float = 0.0

    @property
    def grows(self) -> bool:
        return len(self.tokens) < self.room

    def see(self, confidence: Confidence) -> None:
        """Update the estimates with the tokens that the chain has got since the last call."""
        for token in self.tokens[self.num_seen :]:
            self.last = confidence.rate(token)
            self.survival *= self.last
            self.gain += self.survival
        self.num_seen = len(self.tokens)


class DraftLength:
    """Rule for the number of draft tokens, with its estimates of cost and gain; sessions are named by their slots."""

    def __init__(self) -> None:
        self._steps, self._passes = PassTimes(), PassTimes()
        self._confidence = Confidence()
        self._acceptance: dict[int, Acceptance] = {}

    def begin(self, slot: int) -> None:
        """Set the acceptance rate of a slot back to its first estimate, since another request begins in the slot."""
        self._acceptance[slot] = Acceptance(_PRIOR_TESTED)

    def record_step(self, num_sessions: int, seconds: float) -> None:
        """Record the seconds of one draft step that extended the chains of `num_sessions` sessions."""
        self._steps.record(num_sessions, 0, seconds)

    def record_pass(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None:
        """Record the seconds of one pass of the target.

        Args:
            num_sessions: number of sessions in the pass.
            num_draft_tokens: number of draft tokens that it verified, of all sessions together.
            seconds: time of the pass, without the drafting before it.
        """
        self._passes.record(num_sessions, num_draft_tokens, seconds)

    def record_verdict(self, slot: int, chain: Sequence[DraftToken], num_accepted_tokens: int) -> None:
        """Record the verdict on a session's draft tokens.

        Args:
            slot: the session's slot.
            chain: the draft tokens that the pass verified; empty if there were none.
            num_accepted_tokens: number of the first of them that the target accepted.
        """
        self._of(slot).record(len(chain), num_accepted_tokens)
        for place, token in enumerate(chain[: num_accepted_tokens + 1]):
            self._confidence.record(token, accepted=place < num_accepted_tokens)

    def prune(self, chains: Sequence[Chain], num_sessions: int) -> None:
        """Lower the `room` of chains in which further draft tokens would not raise the pass's tokens per second.

        While no times are measured, chains end at FIRST_LENGTH tokens. With several sessions a few passes then run
        without draft tokens, because the times of wide passes alone do not show what narrow ones cost. A further token
        is assumed to be accepted at the mean of the last token's and the session's rate, since an easy passage is
        usually longer than one token. All growing chains share the time of draft steps and of the wider pass.

        Args:
            chains: chains of the pass, also those that have ended.
            num_sessions: number of sessions in the pass, with or without a chain.
        """
        steps, passes = self._steps.of(num_sessions), self._passes.of(num_sessions)
        if not any(each.grows for each in chains):
            return
        if not steps.is_known or not passes.is_known:
            for chain in chains:
                chain.room = min(chain.room, FIRST_LENGTH)
        elif num_sessions > 1 and passes.asks_for_short():
            for chain in chains:
                chain.room = 0
        else:
            self._weigh(chains, num_sessions, passes)

    def _weigh(self, chains: Sequence[Chain], num_sessions: int, passes: PassCosts) -> None:
        """Set `room` to 0 in chains in which further tokens do not pay, by the costs of the given `passes`."""
        for chain in chains:
            chain.see(self._confidence)
        growing = [each for each in chains if each.grows]
        tokens, number = num_sessions + sum(each.gain for each in chains), len(growing)
        num_drafted = sum(each.num_seen for each in chains)
        step_s, pass_s = self._steps.of(number).seconds(0), passes.seconds(num_drafted)
        now_s = pass_s + max(each.num_seen for each in growing) * step_s
        added_s = [
            (passes.seconds(num_drafted + further * number) - pass_s + further * step_s) / number
            for further in range(1, LOOKED_AHEAD + 1)
        ]
        for chain in growing:
            chain.room *= self._is_worth(chain, tokens, now_s, added_s)

    def _is_worth(self, chain: Chain, tokens: float, now_s: float, added_s: Sequence[float]) -> bool:
        """Return whether further draft tokens of a chain would raise the pass's expected tokens per second.

        Args:
            chain: the chain.
            tokens: expected tokens of the pass over all sessions, with the draft tokens made so far.
            now_s: seconds of that pass and of its drafting.
            added_s: this chain's share of the seconds that 1, 2, ... further draft tokens of each growing chain add.
        """
        session_rate, survival = self._of(chain.turn.slot).rate, chain.survival
        rate = session_rate if chain.last is None else (session_rate + chain.last) / 2
        plans = [(tokens, now_s)]
        for seconds in added_s:
            survival *= rate
            tokens += survival
            plans.append((tokens, now_s + seconds))
        return fastest(plans) > 0

    def num_worth(self, slot: int, tokens: Sequence[DraftToken], num_sessions: int) -> int:
        """Return how many of several tokens that one draft step gave for a session are worth verifying.

        Only prompt lookup gives several at once. They are drafted already, so only their cost in the pass counts. While
        pass times are unknown, FIRST_LENGTH tokens are worth it.

        Args:
            slot: the session's slot.
            tokens: the draft tokens.
            num_sessions: number of sessions in the pass.
        """
        passes, rate = self._passes.of(num_sessions), self._of(slot).rate
        if not passes.is_known:
            return min(len(tokens), FIRST_LENGTH)
        rates = ((rate + self._confidence.rate(token)) / 2 for token in tokens)
        expected = itertools.accumulate(itertools.accumulate(rates, operator.mul), initial=1.0)
        return fastest((each, passes.seconds(number * num_sessions)) for number, each in enumerate(expected))

    def _of(self, slot: int) -> Acceptance:
        return self._acceptance.setdefault(slot, Acceptance(_PRIOR_TESTED))
