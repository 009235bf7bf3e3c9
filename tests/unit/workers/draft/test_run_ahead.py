"""How a session that runs ahead keeps what it knows of the way up to date."""

from __future__ import annotations

from inference.commit import Commit, Timings
from inference.engine.draft import DraftEngine
from inference.engine.draft_session import DraftSession
from inference.request import SamplingParams
from inference.scheduling.round_trip import RoundTrip
from inference.workers.draft.run_ahead import PROBE_AFTER, Runner
from tests.support.scripted import ScriptedProposer

FAR_S, PASS_US = 0.1, 5000


def commit(session: DraftSession, *, echo: int = 0) -> Commit:
    timings = Timings(compute_us=PASS_US)
    return Commit(len(session.committed), (999,), timings=timings, num_received_tokens=echo)


def test_a_way_that_seems_long_is_tried_all_the_same() -> None:
    """The first measurement held the opening of the connection; nothing was expected of any message, so none was sent,
    so nothing corrected it: whole answers went without a draft."""
    engine = DraftEngine(ScriptedProposer())
    engine._recent_steps_s.append(0.001)
    session, round_trip = DraftSession([1, 2], SamplingParams()), RoundTrip()
    round_trip.record(FAR_S)
    runner = Runner(engine, session, round_trip, gamma=4)
    runner.commit(commit(session))
    assert (session.pacing.num_ahead, session.pacing.min_gain) == (0, 0.0)  # no echo yet: anything may be sent

    runner.commit(commit(session, echo=4))
    assert session.pacing.num_ahead == round(FAR_S * 1e6 / PASS_US)  # the way is known
    assert session.pacing.min_gain > 0

    for _ in range(PROBE_AFTER):
        assert session.pacing.min_gain > 0
        runner.commit(commit(session))
    assert (session.pacing.num_ahead, session.pacing.min_gain) == (0, 0.0)  # what is known may be out of date

    runner.stop()
    assert session.pacing.window == 0


def test_the_pass_that_reads_the_prompt_does_not_count_for_long() -> None:
    engine = DraftEngine(ScriptedProposer())
    engine._recent_steps_s.extend([0.5, 0.001, 0.001])  # the first step of a process is slow
    session = DraftSession([1, 2], SamplingParams())
    runner = Runner(engine, session, RoundTrip(), gamma=4)
    runner.commit(Commit(2, (7,), timings=Timings(compute_us=900_000)))
    for _ in range(2):
        runner.commit(commit(session, echo=1))
    assert session.pacing.step_s == 0.001
    assert session.pacing.round_s == PASS_US / 1e6
