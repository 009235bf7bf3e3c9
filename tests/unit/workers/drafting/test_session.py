"""A draft worker's session: how far ahead and how often it drafts, what it counts for each commit, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.commit import Commit, Timings
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.errors import InvalidRequestError, UnavailableError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import GenerationRequest, SamplingParams, Schedule
from specdec.inference.scheduling.link import Link
from specdec.inference.serving.assembly import running
from specdec.inference.workers.drafting.session import PROBE_AFTER, DraftingSession, ProposalSender
from tests.support.scripted import VOCAB_SIZE, ScriptedProposer, token_at, tokens_at, until

FAR_S, PASS_US = 0.1, 5000


@dataclass
class Scene:
    """A draft engine for sessions with a prompt of two tokens, and the messages that the sessions have sent."""

    engine: DraftEngine
    link: Link
    sent: list[pb.Propose] = field(default_factory=list)

    async def send(self, message: pb.Propose) -> None:
        self.sent.append(message)

    def begin(self, schedule: Schedule, *, max_new_tokens: int = 30, metrics: Metrics | None = None) -> DraftingSession:
        sampling = SamplingParams(seed=1)
        request = GenerationRequest((1, 2), sampling, max_new_tokens=max_new_tokens, gamma=4, schedule=schedule)
        proposals = ProposalSender(self.send, self.link)
        return DraftingSession(self.engine, request, proposals, vocab_size=VOCAB_SIZE, metrics=metrics)

    @property
    def rounds(self) -> list[list[int]]:
        """Return the token ids of each message that was sent."""
        return [[token_id for branch in message.branches for token_id in branch.token_ids] for message in self.sent]


@asynccontextmanager
async def scene(link: Link | None = None) -> AsyncGenerator[Scene, None]:
    async with running(DraftEngine(ScriptedProposer())) as engine:
        yield Scene(engine, link or Link())


def commit(position: int, *token_ids: int, echo: int = 0) -> Commit:
    timings = Timings(compute_us=PASS_US)
    return Commit(position, token_ids or (999,), timings=timings, num_received_tokens=echo)


async def test_a_way_that_seems_long_is_tried() -> None:
    """A session that takes its round trip to be long measures it again after some commits.

    Regression: the first measured round trip included the opening of a connection, so no message seemed to be
    worth sending ever again.
    """
    link = Link()
    link.record_round_trip(FAR_S)
    async with scene(link) as scene_:
        scene_.engine._recent_steps_s.append(0.001)
        session = scene_.begin(Schedule.ASYNC)
        session.commit(commit(2))
        assert (session._draft.pacing.num_ahead, session._draft.pacing.min_gain) == (
            0,
            0.0,
        )  # no echo yet: anything may be sent

        session.commit(commit(3, echo=4))
        assert session._draft.pacing.num_ahead == round(FAR_S * 1e6 / PASS_US)  # the way is known
        assert session._draft.pacing.min_gain > 0

        for number in range(PROBE_AFTER):
            assert session._draft.pacing.min_gain > 0
            session.commit(commit(4 + number))
        assert (session._draft.pacing.num_ahead, session._draft.pacing.min_gain) == (
            0,
            0.0,
        )  # what is known may be out of date
        session.close()
        assert scene_.engine.num_running == 0


async def test_the_prompts_pass_does_not_count_for_long() -> None:
    async with scene() as scene_:
        scene_.engine._recent_steps_s.extend([0.5, 0.001, 0.001])  # the first step of a process is slow
        session = scene_.begin(Schedule.ASYNC)
        session.commit(Commit(2, (7,), timings=Timings(compute_us=900_000)))
        for position in (3, 4):
            session.commit(commit(position, echo=1))
        assert session._draft.pacing.step_s == 0.001
        assert session._draft.pacing.round_s == PASS_US / 1e6
        session.close()


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.ASYNC])
async def test_proposals_have_the_time_of_a_step(schedule: Schedule) -> None:
    async with scene() as scene_:
        scene_.engine._recent_steps_s.extend([0.25] * scene_.engine._recent_steps_s.maxlen)  # type: ignore[operator]
        session = scene_.begin(schedule)
        await until(lambda: bool(scene_.sent))
        assert 0 < scene_.sent[0].step_us <= 250_000
        session.close()


async def test_each_round_waits_for_its_verdict() -> None:
    """In rounds, a session drafts after each commit only: gamma tokens, fewer near the end, none for the last token."""
    async with scene() as scene_:
        session = scene_.begin(Schedule.SYNC, max_new_tokens=9)
        await until(lambda: len(scene_.sent) == 1)
        await asyncio.sleep(0.02)
        assert scene_.rounds == [tokens_at(2, 4)]
        figures = session.commit(commit(2, *tokens_at(2, 5), echo=4))
        assert (figures.counts.bytes_up, figures.timings.draft_us > 0) == (scene_.sent[0].ByteSize(), True)
        await until(lambda: len(scene_.sent) == 2)
        assert scene_.rounds[1] == tokens_at(7, 3)
        session.commit(commit(7, token_at(7), 999, 998))
        await until(lambda: len(scene_.sent) == 3)
        assert scene_.rounds[2] == []  # asks for the last token
        session.close()


async def test_wasted_tokens_are_counted_with_the_commit_that_wastes_them() -> None:
    """Draft tokens that a commit makes useless are counted in the figures of that commit, and in the metrics.

    Regression: a worker's counter in the metrics stayed at 0, since commits were counted before their figures were
    known.
    """
    metrics = Metrics("tiny", role="draft")
    async with scene() as scene_:
        session = scene_.begin(Schedule.ASYNC, metrics=metrics)
        await until(lambda: sum(map(len, scene_.rounds)) >= 4)
        right = session.commit(commit(2, *tokens_at(2, 2), echo=2))
        assert right.counts.num_wasted_tokens == 0
        assert right.counts.window > 0
        wrong = session.commit(commit(4, 999, echo=2))
        assert wrong.counts.num_wasted_tokens >= 2
        (counted,) = (
            sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.name == "specdec_wasted_draft_tokens_total"
        )
        assert counted == wrong.counts.num_wasted_tokens
        session.close()


@pytest.mark.parametrize("schedule", Schedule)
async def test_commits_that_cannot_be_are_refused(schedule: Schedule) -> None:
    """A session refuses a commit that does not follow the last one, or exceeds the session's limit of tokens.

    Regression: a proxy lost a message, and 5 of 15 answers had other tokens, with code OK.
    """
    async with scene() as scene_:
        session = scene_.begin(schedule, max_new_tokens=9)
        with pytest.raises(InvalidRequestError, match="position 4, 2 is next"):
            session.commit(commit(4))
        with pytest.raises(InvalidRequestError, match="the session's limit is 11"):
            session.commit(commit(2, *[5] * 10))
        session.close()


@pytest.mark.parametrize("schedule", Schedule)
async def test_a_failed_draft_ends_the_drafting(schedule: Schedule) -> None:
    """If a draft's model fails, its sessions end with an error, so that a target in rounds need not wait for them."""
    async with scene() as scene_:
        session = scene_.begin(schedule)
        await until(lambda: len(scene_.sent) > 0)
        await scene_.engine.stop()
        if schedule is Schedule.SYNC:
            session.commit(commit(2))
        with pytest.raises(UnavailableError, match="shutting down"):
            await asyncio.wait_for(session.drafting, 60)
        session.close()
