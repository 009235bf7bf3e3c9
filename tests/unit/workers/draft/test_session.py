"""How a session that runs ahead keeps what it knows of the way up to date."""

from __future__ import annotations

import asyncio

import pytest
from inference.workers.draft.proposals import ProposalSender
from inference.workers.draft.schedules import PROBE_AFTER, Runner, run_ahead

from inference.commit import Commit, Timings
from inference.engine.draft import DraftEngine
from inference.engine.draft_session import DraftSession
from inference.errors import UnavailableError
from inference.request import SamplingParams
from inference.scheduling.link import Link
from tests.support.scripted import ScriptedProposer, token_at

FAR_S, PASS_US = 0.1, 5000


def commit(session: DraftSession, *, echo: int = 0) -> Commit:
    timings = Timings(compute_us=PASS_US)
    return Commit(len(session.committed), (999,), timings=timings, num_received_tokens=echo)


def test_a_way_that_seems_long_is_tried() -> None:
    """The first measurement held the opening of the connection; nothing was expected of any message, so none was sent,
    so nothing corrected it: whole answers went without a draft."""
    engine = DraftEngine(ScriptedProposer())
    engine._recent_steps_s.append(0.001)
    session, link = DraftSession([1, 2], SamplingParams()), Link()
    link.record_round_trip(FAR_S)
    runner = Runner(engine, session, link, gamma=4)
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


def test_the_prompts_pass_does_not_count_for_long() -> None:
    engine = DraftEngine(ScriptedProposer())
    engine._recent_steps_s.extend([0.5, 0.001, 0.001])  # the first step of a process is slow
    session = DraftSession([1, 2], SamplingParams())
    runner = Runner(engine, session, Link(), gamma=4)
    runner.commit(Commit(2, (7,), timings=Timings(compute_us=900_000)))
    for _ in range(2):
        runner.commit(commit(session, echo=1))
    assert session.pacing.step_s == 0.001
    assert session.pacing.round_s == PASS_US / 1e6


class Target:
    """A `VerifyStream` that commits a token of its own whenever it is asked."""

    def __init__(self) -> None:
        self.proposals = ProposalSender(self._ignore, Link())
        self._position = 2

    async def _ignore(self, message: object) -> None: ...

    async def commit(self) -> Commit:
        await asyncio.sleep(0.001)
        self._position += 1
        return Commit(self._position - 1, (token_at(self._position - 1),))

    def with_figures(self, commit: Commit, **figures: object) -> Commit:
        return commit


async def test_a_drain_reaches_drafts_that_run_ahead() -> None:
    """The story: the grace was over, the engine had ended the session, and the request went on without drafts until
    gRPC cut it a second later: its client was told "Cancelling all calls"."""
    engine, target = DraftEngine(ScriptedProposer()), Target()
    engine.start()
    session = engine.open([1, 2], SamplingParams())
    commits = run_ahead(engine, session, target, gamma=4)  # type: ignore[arg-type]
    assert (await anext(commits)).token_ids == (token_at(2),)
    await engine.stop()
    with pytest.raises(UnavailableError, match="shutting down"):
        async with asyncio.timeout(10):
            _ = [commit async for commit in commits]
