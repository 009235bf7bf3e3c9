"""What a session at the target learns of its draft, and tells it."""

from __future__ import annotations

import pytest

from inference.engine import target_session
from inference.engine.target import TargetEngine
from inference.engine.target_session import TargetSession
from inference.model import Verdict
from inference.request import GenerationRequest, Schedule
from inference.scheduling.waiting import MAX_WAIT_OF_PASS
from inference.scheduling.widths import PROBE_EVERY
from tests.support.scripted import ScriptedDecoder


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(target_session, "time", clock)
    return clock


def drafted_session(clock: Clock, *, max_new_tokens: int = 500) -> TargetSession:
    request = GenerationRequest((1, 2, 3), max_new_tokens=max_new_tokens)
    session = TargetSession(request, max_length=1000, schedule=Schedule.ASYNC, gamma=4)
    session.enter(0)
    take_pass(session, clock, Verdict((10,), 0, 0))
    return session


def take_pass(session: TargetSession, clock: Clock, verdict: Verdict) -> None:
    """Let a pass of 10 ms end with this verdict."""
    turn = session.next_turn()
    assert turn is not None
    started, clock.now = clock.now, clock.now + 0.01
    session.apply(turn, verdict, started=started, ended=clock.now)


def learn_delay(session: TargetSession, clock: Clock, delay_s: float) -> None:
    """Reject proposals, each of which comes `delay_s` after the last rejection."""
    for _ in range(30):
        take_pass(session, clock, Verdict((99,), 1, 0))
        clock.now += delay_s
        session.propose([("prefix", len(session.token_ids), [5, 6])])


def test_proposals_behind_a_rejected_token_do_not_prolong_the_wait(clock: Clock) -> None:
    """They kept arriving for a round trip, each one looked like progress, and the target stood still for as long:
    gaps of 34 ms were seen between passes of 6 ms."""
    session = drafted_session(clock)
    learn_delay(session, clock, 0.004)
    take_pass(session, clock, Verdict((99,), 2, 0))
    rejected = clock.now
    for i in range(20):
        clock.now = rejected + 0.001 * i
        session.propose([("prefix", len(session.token_ids) - 1, [77, 78])])
        late_s = session.arrivals.late_in(clock.now, at_most_s=1.0)
        assert late_s is not None
        assert clock.now + late_s < rejected + 0.01
    assert session.arrivals.late_in(rejected + 0.03, at_most_s=1.0) == pytest.approx(
        session.arrivals.late_in(rejected, at_most_s=1.0) - 0.03  # type: ignore[operator]
    )


def test_a_commit_echoes_what_has_arrived_once(clock: Clock) -> None:
    session = drafted_session(clock)
    session.propose([("prefix", 4, [5, 6]), ("prefix", 1, [9, 9, 9])])  # the second one has lost: counted all the same
    clock.now += 0.002
    take_pass(session, clock, Verdict((5, 99), 2, 1))
    take_pass(session, clock, Verdict((98,), 0, 0))
    commits = [session.commits._queue.get_nowait() for _ in range(3)]
    echoes = [(c.num_received_tokens, c.hold_us) for c in commits if not isinstance(c, Exception)]
    assert echoes == [(0, 0), (5, 12_000), (0, 0)]


@pytest.mark.parametrize("gap_s", [0.001, 0.008, 0.02, 0.5])
def test_no_wait_is_longer_than_its_limit(clock: Clock, gap_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the draft has done so far; behind the limit, the target decodes by itself."""
    engine = TargetEngine(ScriptedDecoder(), num_slots=1, max_length=1000, vocab_size=1000)
    for width in (0, 4) * 20:
        engine._times.record(1, width, 0.010 + 0.0001 * width)
    session = drafted_session(clock)
    learn_delay(session, clock, gap_s)
    take_pass(session, clock, Verdict((99,), 2, 0))
    longest_s = MAX_WAIT_OF_PASS * engine._times.of(1).base_s
    assert engine._wait_s(session, clock.now) <= longest_s
    clock.now += longest_s
    assert engine._wait_s(session, clock.now) <= 0


def test_what_draft_tokens_cost_is_tried_again_now_and_then() -> None:
    """Else a cost that was measured in a bad moment would keep them out for good."""
    engine = TargetEngine(ScriptedDecoder(), num_slots=1, max_length=1000, vocab_size=1000)
    taken = [engine._declined([2, 3]) for _ in range(2 * PROBE_EVERY)]
    assert [widths for widths in taken if any(widths)] == [[0, 3]] * 2
    assert taken[PROBE_EVERY - 1] == [0, 3]
