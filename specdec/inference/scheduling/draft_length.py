"""Number of draft tokens before each pass of the target, where draft and target take turns in one process.

Every draft token costs a step of the draft and makes the pass wider. It gains one token if the target accepts it and
all draft tokens before it. Drafting continues while one more draft token, or a few more, can raise the expected tokens
per second. A few more tokens may pay where one does not, since several widths of a pass take the same time.
Transformers and llama.cpp stop at a fixed probability instead.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.inference.model.proposer import DraftToken
from specdec.inference.scheduling.acceptance import Acceptance, Confidence
from specdec.inference.scheduling.pass_times import PassTimes
from specdec.inference.scheduling.throughput import fastest

FIRST_LENGTH = 4
"""Draft tokens per session and pass while no times are measured: a long wrong draft costs more than short ones lose."""
LOOKED_AHEAD = 6
"""Most further draft tokens that are considered together, since several may pay where one does not."""
_PRIOR_TESTED = 1.0  # less than in other schedules: here every useless token delays the pass


@dataclass(slots=True)
class _Outlook:
    """Expected gain by the draft tokens of one session, a chain that grows; updated with each new token.

    Attributes:
        chain: the draft tokens; a list that grows.
        session_rate: the session's acceptance rate in earlier passes.
        num_seen: number of the chain's first tokens that the other fields describe.
        last: probability that the last of these tokens is accepted if all before it are; the session's rate if there is
            none.
        survival: probability that all of these tokens are accepted.
        tokens: expected number of tokens that a pass commits if it verifies them.
    """

    chain: Sequence[DraftToken]
    session_rate: float
    last: float
    num_seen: int = 0
    survival: float = 1.0
    tokens: float = 1.0

    def see(self, confidence: Confidence) -> None:
        """Update the estimates with the tokens that the chain has got since the last call."""
        while self.num_seen < len(self.chain):
            self.last = confidence.rate(self.chain[self.num_seen])
            self.survival *= self.last
            self.tokens += self.survival
            self.num_seen += 1

    def is_worth(self, tokens: float, now_s: float, added_s: Sequence[float]) -> bool:
        """Return whether further draft tokens of this chain would raise the pass's expected tokens per second.

        Args:
            tokens: expected tokens of the pass over all sessions, with the draft tokens made so far.
            now_s: seconds of that pass and of its drafting.
            added_s: seconds that 1, 2, ... further draft tokens would add.
        """
        rate, survival = (self.session_rate + self.last) / 2, self.survival
        plans = [(tokens, now_s)]
        for seconds in added_s:
            survival *= rate
            tokens += survival
            plans.append((tokens, now_s + seconds))
        return fastest(plans) > 0


class DraftLength:
    """Rule for the number of draft tokens, with its estimates of cost and gain; sessions are named by their slots."""

    def __init__(self) -> None:
        self._steps, self._passes = PassTimes(), PassTimes()
        self._confidence = Confidence()
        self._acceptance: dict[int, Acceptance] = {}
        self._outlooks: dict[int, _Outlook] = {}  # by slot, until the verdict on its chain

    def begin(self, slot: int) -> None:
        """Forget the acceptance rate of a slot, in which another request begins."""
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
        self._outlooks.pop(slot, None)
        self._of(slot).record(len(chain), num_accepted_tokens)
        for place, token in enumerate(chain[: num_accepted_tokens + 1]):
            self._confidence.record(token, accepted=place < num_accepted_tokens)

    def worth(
        self,
        growing: Sequence[tuple[int, Sequence[DraftToken]]],
        ended: Sequence[tuple[int, Sequence[DraftToken]]],
        num_sessions: int,
    ) -> list[bool]:
        """Return, for each growing chain, whether one more draft token in it raises the pass's tokens per second.

        While no times are measured, chains stop at FIRST_LENGTH tokens. With several sessions a few passes then run
        without draft tokens, because the times of wide passes alone do not show what narrow ones cost. A further token
        is assumed to be accepted at the mean of the last token's and the session's rate, since an easy passage is
        usually longer than one token. All growing chains share the time of draft steps and of the wider pass.

        Args:
            growing: slot and draft tokens of each chain that may grow.
            ended: slot and draft tokens of each other chain.
            num_sessions: number of sessions in the pass, with or without a draft.
        """
        steps, passes, number = self._steps.of(num_sessions), self._passes.of(num_sessions), len(growing)
        if not steps.is_known or not passes.is_known:
            return [len(chain) < FIRST_LENGTH for _, chain in growing]
        if num_sessions > 1 and passes.asks_for_short():
            return [False] * number
        outlooks = [self._outlook(slot, chain) for slot, chain in growing]
        others = [self._outlook(slot, chain) for slot, chain in ended]
        tokens = num_sessions + sum(each.tokens - 1.0 for each in (*outlooks, *others))
        num_drafted = sum(each.num_seen for each in (*outlooks, *others))
        step_s, pass_s = self._steps.of(number).seconds(0), passes.seconds(num_drafted)
        now_s = pass_s + max(each.num_seen for each in outlooks) * step_s
        added_s = [
            (passes.seconds(num_drafted + further * number) - pass_s + further * step_s) / number
            for further in range(1, LOOKED_AHEAD + 1)
        ]
        return [outlook.is_worth(tokens, now_s, added_s) for outlook in outlooks]

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

    def _outlook(self, slot: int, chain: Sequence[DraftToken]) -> _Outlook:
        outlook = self._outlooks.get(slot)
        if outlook is None or outlook.chain is not chain:
            rate = self._of(slot).rate
            outlook = self._outlooks[slot] = _Outlook(chain, rate, rate)
        outlook.see(self._confidence)
        return outlook

    def _of(self, slot: int) -> Acceptance:
        return self._acceptance.setdefault(slot, Acceptance(_PRIOR_TESTED))
