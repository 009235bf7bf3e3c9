"""The choice of the sessions and draft tokens of a pass, without an engine."""

from __future__ import annotations

import pytest

from specdec.inference.engine.batching import Batching
from specdec.inference.engine.target_session import TargetSession
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.request import GenerationRequest, SamplingParams, Schedule

PASS_S = 10.0
"""Seconds of a pass, many times those of the test itself, since a batching counts these as waiting too."""


def batching() -> Batching:
    """Return a Batching that has recorded some passes, all of PASS_S seconds."""
    found = Batching(prompt_share=1.0, chunk_tokens=0)
    turn = Turn(0, 2, (5, 6, 7), SamplingParams())
    for _ in range(3):
        found.record([turn], [Verdict((8,), 0, 0)], PASS_S)
    return found


def helped(num_left: int, *, slot: int = 0) -> TargetSession:
    """Return a session with `num_left` tokens to go, whose draft worker sends four tokens 0.2 s after each commit."""
    session = TargetSession(GenerationRequest((5, 6, 7), max_new_tokens=num_left), max_length=60, gamma=4)
    session.follow(Schedule.ASYNC)
    session.enter(slot, 2)
    for started in (0.0, 1.0):
        session.sources.arrivals.proposed(started + 0.2, 4)
        session.sources.arrivals.committed(started + 0.9, all_accepted=False)
    return session


def waits(choice: Batching, *sessions: TargetSession) -> bool:
    return choice.wait_s(choice.turns(sessions), 1.95) > 0


@pytest.mark.parametrize(("num_left", "expected"), [(1, False), (2, True)])
def test_no_wait_for_tokens_that_find_no_room(num_left: int, expected: bool) -> None:
    """The target does not wait for draft tokens that an answer has too few tokens left to use.

    Regression: before the last token of an answer, the target waited for draft tokens that it could not use.
    """
    assert waits(batching(), helped(num_left)) == expected


def test_a_session_that_needs_no_draft_takes_the_others_along() -> None:
    alone = TargetSession(GenerationRequest((5, 6, 7), max_new_tokens=9), max_length=60, gamma=4)
    alone.enter(1, 2)
    assert waits(batching(), helped(9), helped(9, slot=2))
    assert not waits(batching(), helped(9), alone)
    assert not waits(batching())


@pytest.mark.parametrize(("seconds", "expected"), [(1.5 * PASS_S, Schedule.ASYNC), (2.5 * PASS_S, Schedule.SYNC)])
def test_rounds_pay_where_sessions_make_passes_long(seconds: float, expected: Schedule) -> None:
    choice, crowd = batching(), [Turn(slot, 2, (5, 6, 7), SamplingParams()) for slot in range(16)]
    assert choice.schedule(16) is Schedule.ASYNC
    for _ in range(3):
        choice.record(crowd, [Verdict((8,), 0, 0)] * 16, seconds)
    assert (choice.schedule(1), choice.schedule(16)) == (Schedule.ASYNC, expected)
