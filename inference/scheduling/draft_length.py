"""Length of a draft before each pass, where draft and target take turns. Pure.

Every draft token costs a step of the draft and a share of the wider pass. It gains a token if the target agrees with it
and with all before it. Drafting continues while that can raise the expected tokens per second, with one more token or
with a few: a wider pass may take no longer up to the next step of a staircase. Transformers and llama.cpp stop at a
fixed probability instead.
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
"""Draft tokens of a pass while the times are unknown: a long draft that is wrong costs more than short ones lose."""
LOOKED_AHEAD = 6
"""Number of further draft tokens among which one may make all before it pay."""
_PRIOR_TESTED = 1.0  # less than in other schedules: here every useless token delays the pass


@dataclass(slots=True)
class _Outlook:
    """Expectation of a growing chain, brought up to date token by token instead of by a walk over all of it.

    Attributes:
        chain: the list that grows.
        session_rate: acceptance of the session before.
        num_seen: number of the chain's first tokens that the other fields describe.
        last: probability that the last of these is right if all before it are; without any, the session's rate.
        survival: probability that all of these are right.
        tokens: expected tokens of a pass that verifies them.
    """

    chain: Sequence[DraftToken]
    session_rate: float
    last: float
    num_seen: int = 0
    survival: float = 1.0
    tokens: float = 1.0

    def see(self, confidence: Confidence) -> None:
        """Take the tokens into account that the chain has got."""
        while self.num_seen < len(self.chain):
            self.last = confidence.rate(self.chain[self.num_seen])
            self.survival *= self.last
            self.tokens += self.survival
            self.num_seen += 1

    def is_worth(self, tokens: float, now_s: float, added_s: Sequence[float]) -> bool:
        """Return whether 1, 2, ... further tokens raise the `tokens` of `now_s` seconds by more than their time costs.

        Args:
            added_s: seconds of 1, 2, ... further tokens.
        """
        rate, survival = (self.session_rate + self.last) / 2, self.survival
        plans = [(tokens, now_s)]
        for seconds in added_s:
            survival *= rate
            tokens += survival
            plans.append((tokens, now_s + seconds))
        return fastest(plans) > 0


class DraftLength:
    """Estimates of the cost and the gain of drafting. A session is identified by its slot."""

    def __init__(self) -> None:
        self._steps, self._passes = PassTimes(), PassTimes()
        self._confidence = Confidence()
        self._acceptance: dict[int, Acceptance] = {}
        self._outlooks: dict[int, _Outlook] = {}  # by slot, until the verdict on its chain

    def begin(self, slot: int) -> None:
        """Forget the acceptance of a slot, which begins another request."""
        self._acceptance[slot] = Acceptance(_PRIOR_TESTED)

    def record_step(self, num_sessions: int, seconds: float) -> None:
        """Record one step of the draft that extended `num_sessions` chains."""
        self._steps.record(num_sessions, 0, seconds)

    def record_pass(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None:
        """Record one pass of the target."""
        self._passes.record(num_sessions, num_draft_tokens, seconds)

    def record_verdict(self, slot: int, chain: Sequence[DraftToken], num_accepted_tokens: int) -> None:
        """Record the verdict on a session's proposal, which may be empty."""
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
        """Return for each growing chain whether one more draft token in it raises the tokens per second of a pass.

        While the times are unknown, FIRST_LENGTH draft tokens are enough. Several sessions then run a few
        passes without any: their other passes have too many rows to show the time of fewer. The rate of further tokens
        is assumed to be the mean of the last token's and the session's, since an easy passage is usually longer than
        one token. Their share of the time is that of all growing chains, which share draft steps and the kernels'
        sweeps.

        Args:
            growing: slots and tokens of the chains that may grow.
            ended: those of the others.
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
        """Return how many of the tokens that one step gave are worth their places in a pass over `num_sessions`.

        They are drafted already, as those of a lookup are all at once, so only the pass counts. While its times are
        unknown, FIRST_LENGTH tokens are.
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
