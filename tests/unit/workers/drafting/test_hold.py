"""If the target switches drafting off during answers, workers stop, say so, keep their sessions, and go on later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from specdec.inference.commit import Delta
from specdec.inference.config import MEASURED
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.serving.assembly import running
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completion import Completer, CompletionRequest
from specdec.inference.workers.drafting.pool_worker import PoolWorker
from specdec.inference.workers.drafting.service import VerificationServicer
from specdec.inference.workers.drafting.stream import Offer
from tests.support.completers import CARD
from tests.support.edges import WORDS, edge
from tests.support.models import tiny_tokenizer
from tests.support.ports import listening
from tests.support.scripted import ScriptedDecoder, ScriptedProposer, SilentWorker, tokens_at, until

NUM_TOKENS = 1000
REQUEST = CompletionRequest((1, 2, 3), seed=1, max_new_tokens=NUM_TOKENS, ignore_eos=True, gamma=4)


class SlowDecoder(ScriptedDecoder):
    """Decoder that takes 3 ms per pass, so that draft tokens can arrive meanwhile."""

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        time.sleep(0.003)
        return super().step(turns)


class Place:
    """A target, the completer that sends requests to it, and the proposer of its draft worker."""

    def __init__(self, engine: TargetEngine, pool: DraftPool, completer: Completer, proposer: ScriptedProposer) -> None:
        self.engine, self.pool, self.completer, self.proposer = engine, pool, completer, proposer
        proposer.max_length = 1900

    async def complete(self, deltas: list[Delta], schedule: Schedule) -> None:
        async for event in self.completer.complete(replace(REQUEST, schedule=schedule)):
            if isinstance(event, Delta):
                deltas.append(event)

    async def until_held(self) -> None:
        self.engine.drafting.switch(is_on=False)
        await until(lambda: not self.pool.computes)


@asynccontextmanager
async def place(kind: str, schedule: Schedule) -> AsyncGenerator[Place, None]:
    """Yield a target with a draft worker for all clients (`kind` "pool"), or with a client's own one ("private")."""
    async with running(TargetEngine(SlowDecoder(num_slots=4, max_length=2000), EngineLimits(lookup=False))) as engine:
        pool = DraftPool(engine)
        local = LocalCompleter(pool, Tokenizer(tiny_tokenizer(), frozenset()))
        async with listening(GenerationServicer(local, CARD), VerificationServicer(pool, WORDS)) as server:
            if kind == "private":
                async with edge(server.port, schedule) as client:
                    yield Place(engine, pool, client.completer, client.proposer)
                return
            async with running(DraftEngine(proposer := ScriptedProposer())) as drafts:
                worker = PoolWorker(drafts, [f"127.0.0.1:{server.port}"], Offer(WORDS, 4, 2), Metrics("draft"))
                await until(lambda: worker.fault is None)
                yield Place(engine, pool, local, proposer)
                await worker.stop(grace_s=0.0)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("pool", Schedule.SYNC),
        ("pool", Schedule.ASYNC),
        ("private", Schedule.SYNC),
        ("private", Schedule.ASYNC),
    ],
)
async def test_a_worker_that_is_held_stops_and_goes_on(kind: str, schedule: Schedule) -> None:
    async with asyncio.timeout(60), place(kind, schedule) as each:
        deltas: list[Delta] = []
        answer = asyncio.create_task(each.complete(deltas, schedule))
        await until(lambda: sum(delta.num_accepted_tokens for delta in deltas) > 8)
        await each.until_held()
        num_steps, num_deltas = len(each.proposer.steps), len(deltas)
        await until(lambda: len(deltas) > num_deltas + 20)
        assert len(each.proposer.steps) == num_steps, "it computes while it is held"
        assert all(delta.is_held and not delta.num_draft_tokens for delta in deltas[-10:])
        each.engine.drafting.switch(is_on=True)
        num_deltas = len(deltas)
        await answer
        assert sum(delta.num_accepted_tokens for delta in deltas[num_deltas:]) > 20
        assert [token_id for delta in deltas for token_id in delta.token_ids] == tokens_at(3, NUM_TOKENS)


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.ASYNC])
@pytest.mark.parametrize("kind", ["pool", "private"])
async def test_requests_that_come_while_drafting_is_held(kind: str, schedule: Schedule) -> None:
    """A request that begins while drafting is switched off gets tokens at once, and draft tokens later."""
    async with asyncio.timeout(60), place(kind, schedule) as each:
        await each.until_held()
        deltas: list[Delta] = []
        answer = asyncio.create_task(each.complete(deltas, schedule))
        await until(lambda: len(deltas) > 20)
        assert not each.proposer.steps
        each.engine.drafting.switch(is_on=True)
        await answer
        assert sum(delta.num_accepted_tokens for delta in deltas) > 20
        assert [token_id for delta in deltas for token_id in delta.token_ids] == tokens_at(3, NUM_TOKENS)


async def test_a_worker_that_attaches_while_drafting_is_held_is_held() -> None:
    async with asyncio.timeout(60), running(TargetEngine(SlowDecoder(num_slots=4, max_length=2000))) as engine:
        pool = DraftPool(engine)
        engine.drafting.switch(is_on=False)
        async with listening(VerificationServicer(pool, WORDS)) as server, edge(server.port):
            await until(lambda: len(pool._workers) == 1 and not pool.computes)


@pytest.mark.parametrize("takes_hold", [True, False])
async def test_a_worker_of_an_earlier_version_is_never_held(takes_hold: bool) -> None:
    """If drafting is off, a worker that cannot be told to stop (not `takes_hold`) switches it on when it attaches."""
    async with asyncio.timeout(60), running(TargetEngine(ScriptedDecoder(), EngineLimits(drafting=MEASURED))) as engine:
        pool = DraftPool(engine)
        engine.drafting.begin_off()
        worker = SilentWorker("worker", 4, pool)
        worker.takes_hold = takes_hold
        pool.attach(worker)
        async for _ in pool.generate(GenerationRequest((1, 2, 3), max_new_tokens=4)):
            pass
        assert engine.drafting.is_on == (not takes_hold)
