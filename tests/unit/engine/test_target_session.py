"""A request's session at the target and its draft worker: arrival of proposals, waits for them, acknowledgements."""

from __future__ import annotations

import pytest

from specdec.inference.commit import Commit
from specdec.inference.engine import target_session
from specdec.inference.engine.target_session import Looking, TargetSession
from specdec.inference.model.decoder import Verdict
from specdec.inference.request import GenerationRequest, SamplingParams, Schedule
from specdec.inference.speculation import sources
from specdec.inference.speculation.tree import Branch


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(target_session, "time", clock)
    monkeypatch.setattr(sources, "time", clock)
    return clock


def session_of(request: GenerationRequest, schedule: Schedule) -> TargetSession:
    session = TargetSession(request, max_length=1000, gamma=4)
    session.follow(schedule)
    return session


def drafted_session(clock: Clock, *, max_new_tokens: int = 500) -> TargetSession:
    request = GenerationRequest((1, 2, 3), max_new_tokens=max_new_tokens)
    session = session_of(request, Schedule.ASYNC)
    session.enter(0)
    take_pass(session, clock, Verdict((10,), 0, 0))
    return session


def take_pass(session: TargetSession, clock: Clock, verdict: Verdict) -> None:
    """Apply the result of a pass that takes 10 ms."""
    turn = session.next_turn()
    assert turn is not None
    started, clock.now = clock.now, clock.now + 0.01
    session.apply(turn, verdict, started=started, ended=clock.now)


def learn_delay(session: TargetSession, clock: Clock, delay_s: float) -> None:
    """Let a worker send 30 proposals, each `delay_s` after the one before was rejected."""
    for _ in range(30):
        take_pass(session, clock, Verdict((99,), 1, 0))
        clock.now += delay_s
        session.propose([Branch(None, len(session.token_ids), [5, 6])])


def test_late_proposals_do_not_prolong_the_wait(clock: Clock) -> None:
    """Proposals for a chain that was rejected do not prolong the wait for new proposals.

    Regression: they counted as arrivals, and prolonged the wait by a round trip.
    """
    session = drafted_session(clock)
    learn_delay(session, clock, 0.004)
    take_pass(session, clock, Verdict((99,), 2, 0))
    rejected = clock.now
    for i in range(20):
        clock.now = rejected + 0.001 * i
        session.propose([Branch(None, len(session.token_ids) - 1, [77, 78])])
        late_s = session.sources.arrivals.late_in(clock.now, at_most_s=1.0)
        assert late_s is not None
        assert clock.now + late_s < rejected + 0.01
    assert session.sources.arrivals.late_in(rejected + 0.03, at_most_s=1.0) == pytest.approx(
        session.sources.arrivals.late_in(rejected, at_most_s=1.0) - 0.03  # type: ignore[operator]
    )


async def test_a_commit_echoes_what_has_arrived_once(clock: Clock) -> None:
    session = drafted_session(clock)
    lost = Branch(None, 1, [9, 9, 9])  # counted all the same
    session.propose([Branch(None, 4, [5, 6]), lost])
    clock.now += 0.002
    take_pass(session, clock, Verdict((5, 99), 2, 1))
    take_pass(session, clock, Verdict((98,), 0, 0))
    _, *commits = [await session.commits.get() for _ in range(4)]
    echoes = [(c.num_received_tokens, c.hold_us) for c in commits if isinstance(c, Commit)]
    assert echoes == [(0, 0), (5, 12_000), (0, 0)]


def test_branches_that_have_lost_keep_no_slot(clock: Clock) -> None:
    """Proposals that contradict committed tokens do not count as activity, which lets a session keep its slot.

    Regression: one late branch a minute counted as a proposal, so a silent session kept its slot for ever.
    """
    session = session_of(GenerationRequest((1, 2, 3)), Schedule.SYNC)
    session.enter(0)
    clock.now += 50.0
    session.propose([Branch(None, 1, [77, 78])])
    assert session.idle_s == pytest.approx(50.0)
    session.propose([Branch(None, 3, [77])])
    assert session.idle_s == 0.0


@pytest.mark.parametrize(
    ("sampling", "width"),
    [
        (SamplingParams(), 64),
        (SamplingParams(repetition_penalty=1.01), 16),
        (SamplingParams(presence_penalty=0.1), 16),
        (SamplingParams(logit_bias=((5, 1.0),)), 16),
    ],
)
def test_dear_sessions_narrow_a_pass(clock: Clock, sampling: SamplingParams, width: int) -> None:
    """A pass verifies fewer draft tokens of a session whose sampling parameters make each token cost much time.

    `width` is how many of 100 proposed tokens it verifies.

    Regression: one session with penalties, 1024 biases and 64 draft tokens tripled the others' time per
    token.
    """
    request = GenerationRequest((1, 2, 3), sampling, max_new_tokens=500)
    session = session_of(request, Schedule.SYNC)
    session.enter(0)
    session.propose([Branch(None, 3, list(range(100)))])
    turn = session.next_turn()
    assert turn is not None
    assert len(turn.proposal) == width


@pytest.mark.parametrize("prediction", [(), (1, 2, 3)])
def test_a_session_waits_until_lookups_are_due_unless_it_has_a_prediction(prediction: tuple[int, ...]) -> None:
    request = GenerationRequest((1, 2, 3) * 4, max_new_tokens=50, prediction=prediction)
    session = TargetSession(request, max_length=1000, gamma=4, looking=Looking(in_own_text=True, width=4))
    session.enter(0)
    found = []
    for _ in range(2):
        turn = session.next_turn()
        assert turn is not None
        found.append(bool(turn.lookup))
        session.drafting.lookups.passed(64, 4, 0)
    assert found == [True, bool(prediction)]
