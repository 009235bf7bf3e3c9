"""The pool gives sessions to draft workers by their accepted draft tokens, not by the number of slots they report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from specdec.inference.caller import ANYBODY, NamesRequests, request_context
from specdec.inference.commit import Commit
from specdec.inference.config import MEASURED
from specdec.inference.engine import help as help_module
from specdec.inference.engine import private_match
from specdec.inference.engine.contract import VerificationSession
from specdec.inference.engine.help import FIRST_SESSIONS, MAX_SILENT_COMMITS
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.private_match import MAX_EARLY_SESSIONS
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.engine.target_session import TargetSession
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.tree import MAX_TREE_TOKENS, Branch
from tests.support.answers import commits_of, tokens
from tests.support.scripted import ScriptedDecoder, SilentWorker, tokens_at, until

NUM_TOKENS = 300


class GoodWorker(SilentWorker):
    """Draft worker that proposes the target's own tokens, so that all are accepted."""

    def open(self, session: VerificationSession) -> None:
        super().open(session)
        self._propose(session)

    def commit(self, session: VerificationSession, commit: Commit) -> None:
        self._propose(session)

    def _propose(self, session: VerificationSession) -> None:
        length = len(session.token_ids)
        branch = Branch(None, length, tokens_at(length, 32))
        asyncio.get_running_loop().call_soon(self._pool.propose, self, session.help_id, [branch])


class JunkWorker(GoodWorker):
    """Draft worker that proposes at once, and only wrong tokens."""

    def _propose(self, session: VerificationSession) -> None:
        branch = Branch(None, len(session.token_ids), [7] * 4)
        asyncio.get_running_loop().call_soon(self._pool.propose, self, session.help_id, [branch])


@pytest.fixture
async def pool() -> AsyncGenerator[DraftPool, None]:
    async with running(TargetEngine(ScriptedDecoder(num_slots=8))) as engine:
        yield DraftPool(engine)


async def drafted(pool: DraftPool, length: int) -> tuple[list[int], int]:
    """Answer a prompt of `length` tokens; return (tokens, percentage of the later commits that had draft tokens)."""
    request = GenerationRequest(tuple(range(length)), max_new_tokens=NUM_TOKENS, gamma=4)
    commits = await commits_of(pool.generate(request))
    half = commits[len(commits) // 2 :]
    return tokens(commits), sum(commit.num_draft_tokens > 0 for commit in half) * 100 // len(half)


class FullWorker(SilentWorker):
    """Draft worker that reports many slots, and declines all sessions but one."""

    def open(self, session: VerificationSession) -> None:
        super().open(session)
        if len(self.sessions) > 1:
            asyncio.get_running_loop().call_soon(self._pool.decline, self, session.help_id)


@pytest.mark.parametrize("kind", [SilentWorker, FullWorker])
async def test_a_big_claim_does_not_win_sessions(kind: type[SilentWorker], pool: DraftPool) -> None:
    """A draft worker that reports many slots gets no more sessions than it sends useful tokens for.

    Regression: a worker that reported 4096 slots and proposed nothing, or declined, kept every session.
    """
    silent, good = kind("silent", 4096, pool), GoodWorker("good", 8, pool)
    pool.attach(silent)
    pool.attach(good)
    answers = await asyncio.gather(*(drafted(pool, length) for length in range(3, 11)))
    for length, (token_ids, percent) in enumerate(answers, start=3):
        assert token_ids == tokens_at(length, NUM_TOKENS)
        assert percent > 25
    assert silent.most <= FIRST_SESSIONS
    pool.decline(silent, "no session")
    assert silent.sessions == good.sessions == set()
    # Afterwards it is given one at a time, and only where no better one has room.
    _, percent = await drafted(pool, 3)
    assert percent > 25


async def test_a_worker_without_hits_loses_its_sessions(pool: DraftPool) -> None:
    """A worker whose draft tokens are never accepted loses its sessions to a better worker that is idle.

    Regression: a worker with useless tokens that had attached first got and kept each session, beside an idle good
    worker.
    """
    junk, good = JunkWorker("junk", 4096, pool), GoodWorker("good", 4, pool)
    pool.attach(junk)
    pool.attach(good)
    request = GenerationRequest((0, 1, 2), max_new_tokens=2 * NUM_TOKENS, gamma=4)
    commits = await commits_of(pool.generate(request))
    assert tokens(commits) == tokens_at(3, 2 * NUM_TOKENS)
    assert sum(commit.num_accepted_tokens for commit in commits) > NUM_TOKENS / 3
    assert (junk.most, good.most) == (1, 1)
    _ = await commits_of(pool.generate(request))
    assert junk.most == 1, "it was given the next one as well"


async def test_a_silent_worker_costs_nothing(pool: DraftPool) -> None:
    pool.attach(SilentWorker("silent", 4096, pool))
    token_ids, percent = await drafted(pool, 3)
    assert (token_ids, percent) == (tokens_at(3, NUM_TOKENS), 0)
    assert NUM_TOKENS > MAX_SILENT_COMMITS


async def test_a_line_about_a_session_names_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    """The log line about a session that decodes without drafts has the id of that session's request.

    Regression: it had the id of another request or worker, whose arrival or end had given the session its worker.
    """
    caplog.handler.addFilter(NamesRequests())
    request = GenerationRequest((0, 1, 2), max_new_tokens=8, schedule=Schedule.SYNC)
    async with running(TargetEngine(ScriptedDecoder())) as engine:
        pool = DraftPool(engine, idle_timeout_s=0.01)
        with request_context(ANYBODY, "of-the-worker"):
            pool.attach(SilentWorker("silent", 4, pool))
        with request_context(ANYBODY, "of-the-session"):
            events = pool.generate(request)
            await anext(events)
        with request_context(ANYBODY, "of-the-next-worker"):
            pool.attach(SilentWorker("late", 4, pool))
            assert [event async for event in events]
    lines = [record.request for record in caplog.records if "decodes alone" in record.message]  # type: ignore[attr-defined]
    assert lines
    assert set(lines) == {"[of-the-session] "}


async def test_a_good_worker_fills_its_room(pool: DraftPool) -> None:
    good = GoodWorker("good", 8, pool)
    pool.attach(good)
    await asyncio.gather(*(drafted(pool, length) for length in range(3, 11)))
    assert good.most == 8, "sessions that came before its worth was known stayed alone"


async def test_no_worker_gets_more_than_the_operator_allows() -> None:
    async with running(TargetEngine(ScriptedDecoder(num_slots=8))) as engine:
        pool = DraftPool(engine, max_worker_slots=2)
        good = GoodWorker("good", 4096, pool)
        pool.attach(good)
        for _ in range(2):
            await asyncio.gather(*(drafted(pool, length) for length in range(3, 11)))
        assert good.most == 2


async def test_a_worker_that_has_less_room_gives_sessions_back(pool: DraftPool) -> None:
    """A worker that reports fewer slots than before keeps that many sessions; the others go to another worker."""
    first, second = GoodWorker("first", 8, pool), GoodWorker("second", 8, pool)
    pool.attach(first)
    asking = [asyncio.create_task(drafted(pool, length)) for length in (3, 4, 5)]
    await until(lambda: len(first.sessions) == 3)
    first.num_slots = 1
    pool.attach(second)
    pool.resized(first)
    assert (len(first.sessions), len(second.sessions)) == (1, 2)
    pool.detach(second)
    first.num_slots = 8
    pool.resized(first)
    assert len(first.sessions) == 3
    for (token_ids, _), length in zip(await asyncio.gather(*asking), (3, 4, 5), strict=True):
        assert token_ids == tokens_at(length, NUM_TOKENS)


async def test_messages_of_an_earlier_help_are_too_late(pool: DraftPool) -> None:
    """If a worker loses a session and gets it again, proposals that it sends for the earlier time have no effect.

    Regression: the session had the same id as before, so proposals for the old time were taken for new ones.
    """
    worker = SilentWorker("worker", 2, pool)
    pool.attach(worker)
    asked = [pool.generate(GenerationRequest(tuple(range(length)), max_new_tokens=NUM_TOKENS)) for length in (3, 4)]
    for commits in asked:
        await anext(commits)
    sessions = [help_.session for help_ in pool._workers[worker].sessions.values()]
    session = next(each for each in sessions if len(each.request.prompt_token_ids) == 4)
    assert isinstance(session, TargetSession)
    first = session.help_id
    pool.propose(worker, first, [Branch(None, 4, tokens_at(4, 8))])
    worker.num_slots = 1
    pool.resized(worker)
    await asked[0].aclose()
    assert worker.sessions == {session.id}, "there is room again"
    pool.propose(worker, first, [Branch(7, 0, tokens_at(12, 4))])
    assert session.sources.tree.num_numbers == 0
    pool.propose(worker, session.help_id, [Branch(None, 4, tokens_at(4, 8))])
    assert session.sources.tree.num_numbers == 8
    await asked[1].aclose()


class PrivateWorker(SilentWorker):
    """Worker that drafts only for the requests of its own connection, as the worker of a client does."""

    scope = "alice 1/"

    def proposes(self, name: str, *branches: Branch) -> None:
        self._pool.propose(self, name, branches)


def named(name: str, schedule: Schedule = Schedule.ASYNC) -> GenerationRequest:
    return GenerationRequest((0, 1, 2), max_new_tokens=40, gamma=8, schedule=schedule, draft_session=f"alice 1/{name}")


async def num_accepted(pool: DraftPool, request: GenerationRequest) -> int:
    commits = await commits_of(pool.generate(request))
    assert tokens(commits) == tokens_at(3, request.max_new_tokens)
    return sum(commit.num_accepted_tokens for commit in commits)


FIRST = Branch(None, 3, tokens_at(3, 8))


async def test_drafts_may_arrive_before_their_request(pool: DraftPool) -> None:
    private = PrivateWorker("private", 8, pool)
    pool.attach(private)
    private.proposes("a", FIRST)
    private.proposes("a", Branch(7, 0, tokens_at(11, 8)))
    assert await num_accepted(pool, named("b")) == 0
    assert await num_accepted(pool, replace(named("a"), draft_session="bob 1/a")) == 0, "of another account"
    assert await num_accepted(pool, replace(named("a"), draft_session="alice 2/a")) == 0, "of another connection"
    assert await num_accepted(pool, replace(named("a"), draft_session="")) == 0, "a private worker is lent"
    assert await num_accepted(pool, named("a")) > 8, "of two messages"
    assert await num_accepted(pool, named("a")) == 0, "drafts serve one request"


async def test_early_drafts_are_bounded(pool: DraftPool) -> None:
    private = PrivateWorker("private", 8, pool)
    pool.attach(private)
    for number in range(MAX_EARLY_SESSIONS + 1):
        private.proposes(f"{number}", FIRST)
    assert [await num_accepted(pool, named(f"{number}")) for number in (0, 1)] == [0, 8]
    private.proposes("long", FIRST, Branch(0, 0, [7] * MAX_TREE_TOKENS))
    assert await num_accepted(pool, named("long")) == 0


async def test_early_drafts_end_by_themselves(pool: DraftPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens that come before their request are dropped after a time, whether or not their worker sends more.

    Regression: only a further message of the worker led to a check of the time, and dropped one request's tokens.
    """
    monkeypatch.setattr(private_match, "EARLY_S", 0.05)
    private = PrivateWorker("private", 8, pool)
    pool.attach(private)
    for name in ("a", "b", "c"):
        private.proposes(name, FIRST)
    pool.decline(private, "d")
    await until(lambda: not pool._workers[private].early)
    private.proposes("later", FIRST)
    await until(lambda: not pool._workers[private].early)


async def test_a_private_worker_takes_its_session_from_the_pool(pool: DraftPool) -> None:
    private, good = PrivateWorker("private", 8, pool), GoodWorker("good", 8, pool)
    pool.attach(good)
    events = pool.generate(replace(named("a"), max_new_tokens=NUM_TOKENS))
    await anext(events)
    assert (len(good.sessions), len(private.sessions)) == (1, 0)
    pool.attach(private)
    private.proposes("a", FIRST)
    assert (len(good.sessions), len(private.sessions)) == (0, 1)
    other = pool.generate(named("b"))
    await anext(other)
    assert len(good.sessions) == 0, "the pool helped a request whose private worker is attached"
    await other.aclose()
    pool.detach(private)
    assert len(good.sessions) == 1
    token_ids = [token_id async for event in events if isinstance(event, Commit) for token_id in event.token_ids]
    assert token_ids == tokens_at(3, NUM_TOKENS)


@pytest.mark.parametrize(
    "fault", [(Branch(99, 0, [5]),), (Branch(None, 3, [10**6]),), ()], ids=["parent", "id", "empty"]
)
async def test_an_invalid_proposal_costs_a_private_worker_one_session(
    pool: DraftPool, fault: tuple[Branch, ...]
) -> None:
    pool.attach(private := PrivateWorker("private", 8, pool))
    answers = {name: pool.generate(named(name)) for name in ("good", "bad")}
    for name, events in answers.items():
        await anext(events)
        private.proposes(name, FIRST)
    private.proposes("bad", *fault)
    private.proposes("bad", FIRST)  # was under way
    assert len(private.sessions) == 1
    good, bad = [
        sum([each.num_accepted_tokens async for each in events if isinstance(each, Commit)])
        for events in answers.values()
    ]
    assert good > 0 == bad


async def test_rounds_wait_for_their_worker(pool: DraftPool) -> None:
    """In rounds with a draft worker, each pass waits for the worker's draft tokens and verifies some."""
    pool.attach(GoodWorker("good", 8, pool))
    commits = await commits_of(pool.generate(replace(named(""), draft_session="", schedule=Schedule.SYNC)))
    assert all(commit.num_accepted_tokens == len(commit.token_ids) - 1 > 0 for commit in commits[:-1])


async def test_a_round_that_waits_for_a_worker_ends_when_drafting_is_held() -> None:
    async with asyncio.timeout(10), running(TargetEngine(ScriptedDecoder(), EngineLimits(drafting=MEASURED))) as engine:
        pool = DraftPool(engine)
        silent = SilentWorker("silent", 8, pool)
        silent.takes_hold = True
        pool.attach(silent)
        request = replace(named(""), draft_session="", schedule=Schedule.SYNC)
        answer = asyncio.create_task(commits_of(pool.generate(request)))
        await until(lambda: bool(silent.sessions))
        await engine.until_step_ends()
        pool.engine.drafting.begin_off()
        assert all(commit.is_held for commit in (await answer)[1:])


class CrowdedEngine(TargetEngine):
    """Engine that always drafts in rounds (draft, then verify), as an engine with many sessions chooses to."""

    schedule = Schedule.SYNC


@pytest.mark.parametrize("num_slots", [2, 8])
@pytest.mark.parametrize("asked", [None, Schedule.ASYNC])
async def test_a_crowded_target_chooses_rounds(asked: Schedule | None, num_slots: int) -> None:
    """A target with many sessions drafts in rounds with a worker whose tokens were often accepted before.

    `asked` is the schedule that the requests name, and `num_slots` is that of the worker.

    Two cases run ahead instead: a request that asks for it, and a worker of which no token was accepted yet.
    """
    async with running(CrowdedEngine(ScriptedDecoder(num_slots=8))) as engine:
        pool = DraftPool(engine)
        good = GoodWorker("good", num_slots, pool)
        pool.attach(good)
        seen = []
        for _ in range(2):
            events = pool.generate(replace(named(""), draft_session="", schedule=asked))
            await anext(events)
            seen += [help_.session.runs_ahead for help_ in pool._workers[good].sessions.values()]
            assert sum([event.num_accepted_tokens async for event in events if isinstance(event, Commit)]) > 0
        assert seen == [True, asked is Schedule.ASYNC]


async def test_rounds_of_the_targets_choice_are_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds that the target has chosen, not the request, it waits only `PATIENCE_S` for a silent worker."""
    monkeypatch.setattr(help_module, "PATIENCE_S", 0.05)
    async with running(CrowdedEngine(ScriptedDecoder(num_slots=8))) as engine:
        pool = DraftPool(engine)
        silent = SilentWorker("silent", 8, pool)
        pool.attach(silent)
        pool._workers[silent].trust += 1
        assert await num_accepted(pool, replace(named(""), draft_session="")) == 0
        assert (silent.most, silent.sessions) == (1, set())


@asynccontextmanager
async def in_a_long_pass(
    request: GenerationRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[DraftPool, None]:
    """Yield a pool at a target that chooses rounds, while a pass over `request` takes longer than `PATIENCE_S`."""
    monkeypatch.setattr(help_module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(help_module, "FIRST_SESSIONS", 0)  # a new worker counts as one with accepted tokens
    decoder = ScriptedDecoder(num_slots=8)
    async with running(CrowdedEngine(decoder)) as engine:
        pool = DraftPool(engine)
        events = pool.generate(request)
        await anext(events)
        decoder.gate.close()
        await asyncio.to_thread(decoder.gate.wait_until_reached)
        await asyncio.sleep(0.06)
        try:
            yield pool
        finally:
            decoder.gate.open()
            await events.aclose()


async def test_a_hand_over_in_a_long_pass_gives_the_worker_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is given a session has `PATIENCE_S` from that moment on for its first proposal.

    Regression: the time began at the session's last commit. If a longer pass was running, the worker lost the session
    as soon as it got it, and with it half of its trust (the number of sessions that it may have).
    """
    request = replace(named(""), draft_session="", schedule=None, max_new_tokens=NUM_TOKENS)
    async with in_a_long_pass(request, monkeypatch) as pool:
        good = GoodWorker("good", 8, pool)
        pool.attach(good)
        await asyncio.sleep(0.06)
        assert len(good.sessions) == 1
        assert pool._workers[good].trust == FIRST_SESSIONS


@pytest.mark.parametrize("branch", [FIRST, Branch(99, 0, [5])], ids=["good", "nonsense"])
async def test_a_private_workers_first_proposal_may_come_in_a_long_pass(
    branch: Branch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client's own worker that proposes during a long pass gets the session, and loses it for an invalid proposal.

    Regression: it lost the session before the target looked at the proposal. If this was invalid too, a KeyError
    ended the worker's stream, and so its drafts for all other sessions.
    """
    request = replace(named("a"), schedule=None, max_new_tokens=NUM_TOKENS)
    async with in_a_long_pass(request, monkeypatch) as pool:
        pool.attach(private := PrivateWorker("private", 8, pool))
        private.proposes("a", branch)
        assert len(private.sessions) == (branch is FIRST)
        assert pool._workers[private].trust == FIRST_SESSIONS
        assert "decodes alone" not in caplog.text


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("early", [True, False])
async def test_the_pool_helps_where_a_private_worker_does_not(pool: DraftPool, early: bool, schedule: Schedule) -> None:
    """A request that its client's own worker declines, before or after it comes, gets a worker of the shared pool."""
    private, good = PrivateWorker("private", 8, pool), GoodWorker("good", 8, pool)
    pool.attach(private)
    pool.attach(good)
    if early:
        pool.decline(private, "a")
    answer = asyncio.create_task(num_accepted(pool, replace(named("a", schedule), max_new_tokens=NUM_TOKENS)))
    await until(lambda: bool(pool._helped))
    pool.decline(private, "a")
    assert (len(good.sessions), len(private.sessions)) == (1, 0)
    assert await answer > 0
