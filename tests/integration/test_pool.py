"""Tests that draft workers of a target's pool may come, go, die and fall silent: only the clients' speed changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
import pytest_asyncio

from specdec.comparison.run.proxy import delay_proxy
from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.health import is_serving
from specdec.inference.request import SamplingParams, Schedule
from specdec.inference.serving.processes import ServerProcess, free_port
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support.servers import complete, complete_all, figure, interrupted, pool_worker, target_server

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LONG = CompletionRequest("and the wind", SamplingParams(temperature=0.8), seed=3, max_new_tokens=360, ignore_eos=True)


def some_requests() -> list[CompletionRequest]:
    """Return six requests.

    Every second one lets the target wait for draft tokens; for the others, the draft worker runs ahead.
    """
    schedules = [Schedule.ASYNC, Schedule.SYNC] * 3
    common = replace(LONG, max_new_tokens=60)
    return [replace(common, prompt=f"the {i} wind", seed=i, schedule=each) for i, each in enumerate(schedules)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pooled_target(models: ModelDirectories) -> AsyncGenerator[ServerProcess, None]:
    """Start a target with slowed passes; a draft worker with an equal model would otherwise be late with all tokens."""
    async with target_server(models.endless, "--emulate", "target:3ms") as server:
        yield server


async def until_helped(target: ServerProcess) -> None:
    """Send requests until one gets draft tokens, which shows that the target has a draft worker again."""
    async with asyncio.timeout(60):
        while not (await complete(target, replace(LONG, max_new_tokens=40))).num_draft_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def alone(target: ServerProcess, requests: list[CompletionRequest]) -> list[list[int]]:
    """Return the token ids that the target gives to these requests without draft tokens (gamma 0)."""
    completions = await complete_all(target, [replace(request, gamma=0) for request in requests])
    assert all(completion.num_draft_tokens == 0 for completion in completions)
    return [completion.token_ids for completion in completions]


async def test_a_worker_helps_and_changes_nothing(pooled_target: ServerProcess, models: ModelDirectories) -> None:
    """A pool worker's draft tokens are accepted and change no answer; the worker serves its own health and metrics.

    Regression: a pool worker accepted the flag `--metrics_port`, and ignored it.
    """
    expected = await alone(pooled_target, some_requests())
    port, metrics_port = free_port(), free_port()
    flags = ("--serve", str(port), "--metrics_port", str(metrics_port))
    async with pool_worker(models.endless, pooled_target.address, flags=flags):
        await until_helped(pooled_target)
        shown = [replace(request, include_rejected=True) for request in some_requests()]
        completions = await complete_all(pooled_target, shown)
        assert [completion.token_ids for completion in completions] == expected
        passes = [rejected for completion in completions for rejected in completion.rejected[:-1]]
        assert not any(text for num, text in passes if not num)
        assert all(completion.num_accepted_tokens > 0 for completion in completions[1::2])
        async with open_channel(f"127.0.0.1:{port}") as channel:
            assert await is_serving(channel)
        assert await figure(metrics_port, "vllm:spec_decode_num_accepted_tokens_total") > 0
    completions = await complete_all(pooled_target, some_requests())
    assert [completion.token_ids for completion in completions] == expected


async def test_a_stranger_and_a_twin_in_one_pool(pooled_target: ServerProcess, models: ModelDirectories) -> None:
    expected = await alone(pooled_target, some_requests())
    async with pool_worker(models.endless, pooled_target.address), pool_worker(models.stranger, pooled_target.address):
        completions = await complete_all(pooled_target, some_requests())
    assert [completion.token_ids for completion in completions] == expected


async def test_a_worker_killed_in_mid_stream(pooled_target: ServerProcess, models: ModelDirectories) -> None:
    (expected,) = await alone(pooled_target, [LONG])
    async with pool_worker(models.endless, pooled_target.address) as worker:
        await until_helped(pooled_target)
        completion = await interrupted(pooled_target, LONG, {100: worker.kill})
    assert completion.token_ids == expected
    assert completion.num_accepted_tokens > 0


async def test_a_worker_whose_link_falls_silent(pooled_target: ServerProcess, models: ModelDirectories) -> None:
    (expected,) = await alone(pooled_target, [LONG])
    async with delay_proxy(pooled_target.port) as link, pool_worker(models.endless, link.address):
        await until_helped(pooled_target)
        async with asyncio.timeout(60):
            completion = await interrupted(pooled_target, LONG, {100: link.blackhole})
    assert completion.token_ids == expected
