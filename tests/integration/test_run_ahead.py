"""Tests of drafts that run ahead of verification: every answer has the target's own tokens.

That holds also over a network that delays, jitters, breaks or falls silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from specdec.comparison.run.proxy import DelayProxy, LinkConditions, delay_proxy
from specdec.inference.config import ModelConfig, ProposerConfig
from specdec.inference.engine.draft_session import DraftSession
from specdec.inference.errors import UnavailableError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import SamplingParams, Schedule
from specdec.inference.serving.assembly import draft_engine, load_proposer, running
from specdec.inference.serving.processes import ServerProcess
from specdec.inference.workers.completion import CompletionRequest
from specdec.inference.workers.drafting.pool_worker import PoolWorker
from specdec.inference.workers.drafting.stream import Offer
from tests.conftest import ModelDirectories
from tests.support.servers import complete, complete_all, cut_for, draft_server, interrupted, target_server, with_gamma

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

RECONNECT_TIMEOUT_S = 3
FAR = LinkConditions(rtt_s=0.04, jitter_s=0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far_target(models: ModelDirectories) -> AsyncGenerator[ServerProcess, None]:
    """Start a target with passes slowed to 8 ms.

    So a draft worker has time to draft several alternatives (branches) for the tokens that come next.
    """
    async with target_server(models.endless, "--emulate", "target:8ms") as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def link(far_target: ServerProcess) -> AsyncGenerator[DelayProxy, None]:
    async with delay_proxy(far_target.port) as proxy:
        yield proxy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(
    models: ModelDirectories, far_target: ServerProcess, link: DelayProxy
) -> AsyncGenerator[ServerProcess, None]:
    """Start a draft server that reaches the target through the proxy `link`; the target accepts some of its tokens."""
    flags = ("--schedule", "async", "--branches", "3", "--reconnect_timeout_s", str(RECONNECT_TIMEOUT_S))
    async with draft_server(models.related, replace(far_target, address=link.address), *flags) as server:
        yield server


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _healthy(link: DelayProxy) -> None:
    link.restore()
    link.conditions = LinkConditions()


def some_requests(num_tokens: int = 40) -> list[CompletionRequest]:
    """Return greedy and sampled requests with different numbers of tokens."""
    settings = [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=1.0, top_p=0.9)]
    return [
        CompletionRequest(f"and the {i} wind", sampling, seed=i, max_new_tokens=num_tokens + i)
        for i, sampling in enumerate(settings * 2)
    ]


async def test_branches_come_true_over_a_slow_link(
    far_target: ServerProcess, worker: ServerProcess, link: DelayProxy
) -> None:
    link.conditions, requests = FAR, some_requests(60)
    alone = await complete_all(far_target, requests)
    async with asyncio.timeout(60):
        num_hits = 0
        while not num_hits:  # on a busy machine branches come too late at first
            helped = await complete_all(worker, requests)
            assert [h.token_ids for h in helped] == [a.token_ids for a in alone]
            num_hits = sum(h.num_branch_hits for h in helped)


async def test_branches_of_a_pool_worker(
    far_target: ServerProcess, link: DelayProxy, models: ModelDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    link.conditions, requests = FAR, some_requests(100)[:3]
    alone = await complete_all(far_target, with_gamma(requests, 0))
    model = ModelConfig(models.related, num_slots=3, num_threads=1)
    loaded = await load_proposer(ProposerConfig(models.related, model, num_slots=3, branches=3))
    async with running(draft_engine(loaded, max_waiting=0)) as engine:
        sessions, opened = list[DraftSession](), engine.open

        def watched(*given: Any, **more: Any) -> DraftSession:
            sessions.append(opened(*given, **more))
            return sessions[-1]

        monkeypatch.setattr(engine, "open", watched)
        helping = PoolWorker(engine, [link.address], Offer(loaded.vocabulary, 4, 3), Metrics("draft"))
        try:
            async with asyncio.timeout(60):
                while not any(session.num_branch_hits for session in sessions):  # once it has attached, and is in time
                    helped = await complete_all(far_target, requests)
                    assert [h.token_ids for h in helped] == [a.token_ids for a in alone]
        finally:
            await helping.stop(grace_s=0)


async def test_the_target_decodes_on_while_the_network_is_slow(worker: ServerProcess, link: DelayProxy) -> None:
    """While the network is slow, the target goes on without waiting for draft tokens.

    If it waited, at least 19 draft tokens would be verified for 40 tokens at gamma 1; here there must be fewer.
    """
    link.conditions = LinkConditions(rtt_s=0.3)
    completion = await complete(worker, replace(some_requests()[0], gamma=1))
    assert len(completion.token_ids) == 40
    assert completion.num_draft_tokens < 19


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.ASYNC])
async def test_a_cut_link_is_redialled_with_equal_tokens(
    far_target: ServerProcess, worker: ServerProcess, link: DelayProxy, schedule: Schedule
) -> None:
    link.conditions = LinkConditions(rtt_s=0.01)  # so that the target is not done when the first commits come
    request = replace(some_requests()[1], max_new_tokens=300, ignore_eos=True, schedule=schedule)
    alone = await complete(far_target, request)
    cut = cut_for(link, 0.3)
    assert (await interrupted(worker, request, {20: cut, 100: cut})).token_ids == alone.token_ids


async def test_a_link_that_stays_cut_is_unavailable(worker: ServerProcess, link: DelayProxy) -> None:
    link.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(complete(worker, some_requests()[0]), timeout=RECONNECT_TIMEOUT_S + 60)


async def test_a_worker_that_was_cut_off_serves_on(
    far_target: ServerProcess, worker: ServerProcess, link: DelayProxy
) -> None:
    """A draft server whose link was cut by the tests before still completes all requests, with the right tokens."""
    requests = some_requests()
    alone = await complete_all(far_target, requests)
    assert [h.token_ids for h in await complete_all(worker, requests)] == [a.token_ids for a in alone]
