"""Branches beside the chain: over a slow link the tokens stay the target's own, and some branches come true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from specdec.comparison.run.proxy import DelayProxy, LinkConditions, delay_proxy
from specdec.grpc_comm.server import Server
from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.backends.registry import asleep
from specdec.inference.config import ConnectionConfig, DraftConfig, ModelConfig, ProposerConfig
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.engine.draft_session import DraftSession
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import TargetEngine
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import SamplingParams, Schedule
from specdec.inference.serving.assembly import load_proposer, private_worker, running
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.calls.status import to_status
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.remote import card_of_target
from specdec.inference.workers.completion import Completer, CompletionRequest, ModelCard
from specdec.inference.workers.drafting.pool_worker import PoolWorker
from specdec.inference.workers.drafting.service import VerificationServicer
from specdec.inference.workers.drafting.stream import Offer
from tests.conftest import ModelDirectories
from tests.support.servers import Completion, complete_all, until_attached

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BRANCHES = 3
PASS_S = 0.008
FAR = LinkConditions(rtt_s=0.04, jitter_s=0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far_target(models: ModelDirectories) -> AsyncGenerator[Server, None]:
    """Serve a target in this process."""
    fast = TorchBackend(AutoModelForCausalLM.from_pretrained(models.endless), num_slots=8, max_length=512)
    backend = asleep(fast, lambda spans: PASS_S)  # as long as those of a model that is worth a draft's branches
    tokenizer = Tokenizer.load(models.endless)
    words = Vocabulary(tokenizer.fingerprint, backend.vocab_size)
    target = TargetEngine(SlotDecoder(backend))
    async with running(target) as engine:
        pool = DraftPool(engine)
        card = ModelCard("target", "target", 512, backend.vocab_size, tokenizer.fingerprint, model_id="m")
        generation = GenerationServicer(LocalCompleter(pool, tokenizer, model_id="m"), card)
        server = Server("127.0.0.1:0", [VerificationServicer(pool, words), generation], status_of=to_status)
        await server.open()
        yield server
        await engine.stop()
        await server.close()


async def complete_at(target: Server, requests: list[CompletionRequest]) -> list[Completion]:
    return await complete_all(f"127.0.0.1:{target.port}", requests)


@pytest_asyncio.fixture(loop_scope="module")
async def link(far_target: Server) -> AsyncGenerator[DelayProxy, None]:
    async with delay_proxy(far_target.port, FAR) as proxy:
        yield proxy


def some_requests(num_tokens: int = 60) -> list[CompletionRequest]:
    """Return greedy and sampled requests."""
    settings = [SamplingParams(), SamplingParams(temperature=0.8), SamplingParams(temperature=1.0, top_p=0.9)]
    return [
        CompletionRequest(f"and the {i} wind", sampling, seed=i, max_new_tokens=num_tokens, ignore_eos=True)
        for i, sampling in enumerate(settings * 2)
    ]


def watched(engine: DraftEngine) -> list[DraftSession]:
    """Return a list to which every session is added that will be opened."""
    sessions: list[DraftSession] = []
    opened = engine.open

    def open_watched(*args: object, **kwargs: object) -> DraftSession:
        sessions.append(opened(*args, **kwargs))  # type: ignore[arg-type]
        return sessions[-1]

    engine.open = open_watched  # type: ignore[method-assign]
    return sessions


def proposer_config(model: Path) -> ProposerConfig:
    return ProposerConfig(model, ModelConfig(model, num_slots=3, num_threads=1), num_slots=3, branches=BRANCHES)


@asynccontextmanager
async def worker(model: Path, link: DelayProxy) -> AsyncGenerator[tuple[Completer, list[DraftSession]], None]:
    """Yield a client with an attached draft worker in this process, and the sessions that the worker opens."""
    loaded = await load_proposer(proposer_config(model))
    connection = ConnectionConfig("127.0.0.1", link.port, reconnect_timeout_s=10.0)
    config = DraftConfig(connection, schedule=Schedule.ASYNC)
    async with connected(connection) as fleet:
        card = await card_of_target(fleet)
        async with private_worker(loaded, config, fleet, card) as (drafter, engine):
            await until_attached(drafter)
            yield FailoverCompleter(fleet, connection, drafter), watched(engine)


def num_branch_hits(sessions: Sequence[DraftSession]) -> int:
    return sum(session.num_branch_hits for session in sessions)


async def complete(completer: Completer, request: CompletionRequest) -> Completion:
    completion = Completion()
    async for event in completer.complete(request):
        completion.record(event)
    return completion


@pytest.mark.parametrize("conditions", [LinkConditions(), FAR], ids=["near", "far"])
async def test_tokens_are_the_targets_and_branches_come_true(
    far_target: Server, link: DelayProxy, models: ModelDirectories, conditions: LinkConditions
) -> None:
    link.conditions = conditions
    alone = await complete_at(far_target, some_requests())
    async with worker(models.related, link) as (completer, sessions):
        async with asyncio.timeout(60):
            while True:  # on a busy machine branches come too late at first
                helped = await asyncio.gather(*(complete(completer, request) for request in some_requests()))
                assert [h.token_ids for h in helped] == [a.token_ids for a in alone]
                if conditions is not FAR or num_branch_hits(sessions):
                    break


async def test_branches_of_a_pool_worker(far_target: Server, link: DelayProxy, models: ModelDirectories) -> None:
    requests = some_requests(100)[:3]
    alone = await complete_at(far_target, [replace(request, gamma=0) for request in requests])
    loaded = await load_proposer(proposer_config(models.related))
    async with running(DraftEngine(loaded.proposer)) as engine:
        sessions = watched(engine)
        helping = PoolWorker(engine, [link.address], Offer(loaded.vocabulary, 4, 3), Metrics("draft"))
        try:
            async with asyncio.timeout(60):
                while not num_branch_hits(sessions):  # the worker has attached, and branches are in time
                    helped = await complete_at(far_target, requests)
                    assert [h.token_ids for h in helped] == [a.token_ids for a in alone]
        finally:
            await helping.stop(grace_s=0)
