"""Tests that all servers give the target's own tokens in bfloat16, with any draft, and if a process dies meanwhile.

Real processes with the models in this repository, over real sockets. The last test ends a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_PROMPTS, BUNDLED_TARGET, ConnectionConfig
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import ServerProcess
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completion import CompletionRequest
from tests.support.servers import (
    complete_all,
    completed_by,
    draft_server,
    fused_server,
    interrupted,
    pool_worker,
    target_server,
    with_gamma,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

FLAGS = ("--dtype", "bfloat16", "--batch", "4", "--sequence_length", "256")
REQUESTS = [
    CompletionRequest(prompt, sampling, seed=seed, max_new_tokens=32, ignore_eos=True)
    for sampling in (SamplingParams(), SamplingParams(temperature=0.8))
    for seed, prompt in enumerate(BUNDLED_PROMPTS.read_text().splitlines()[:2])
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target() -> AsyncGenerator[ServerProcess, None]:
    async with target_server(BUNDLED_TARGET, *FLAGS) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(target: ServerProcess) -> list[list[int]]:
    """Return the token ids that the target gives without a draft, to one request at a time."""
    return tokens_of(await complete_all(target, with_gamma(REQUESTS, 0), concurrency=1))


def tokens_of(completions: object) -> list[list[int]]:
    return [completion.token_ids for completion in completions]  # type: ignore[attr-defined]


async def test_a_crowd_and_kept_prefixes_change_no_token(target: ServerProcess, alone: list[list[int]]) -> None:
    for _ in range(2):
        assert tokens_of(await complete_all(target, with_gamma(REQUESTS, 0))) == alone


async def test_a_fused_server_gives_the_targets_tokens(alone: list[list[int]]) -> None:
    async with fused_server(BUNDLED_TARGET, BUNDLED_DRAFT, *FLAGS) as server:
        completions = await complete_all(server, REQUESTS)
    assert tokens_of(completions) == alone
    assert sum(completion.num_accepted_tokens for completion in completions) > 30


@pytest.mark.release
async def test_a_draft_at_the_edge_gives_the_targets_tokens(target: ServerProcess, alone: list[list[int]]) -> None:
    async with draft_server(BUNDLED_DRAFT, target, "--dtype", "bfloat16") as server:
        completions = await complete_all(server, REQUESTS)
    assert tokens_of(completions) == alone
    assert sum(completion.num_draft_tokens for completion in completions) > 0


async def test_a_worker_is_killed_and_changes_no_token(target: ServerProcess, alone: list[list[int]]) -> None:
    async with pool_worker(BUNDLED_DRAFT, target.address) as worker:
        others = asyncio.create_task(complete_all(target, REQUESTS[1:]))
        completion = await interrupted(target, REQUESTS[0], {20: worker.kill})
        assert tokens_of([completion, *await others]) == alone


@pytest.mark.release
async def test_no_stream_goes_on_in_the_other_mode(target: ServerProcess) -> None:
    """The flag `--exact never` changes a server's model id: servers continue each other's answers only at equal ids."""

    async def model_id(server: ServerProcess) -> str:
        async with open_channel(server.address) as channel:
            return str((await rpc.GenerationServiceStub(channel).GetModel(pb.GetModelRequest())).model_id)

    async with target_server(BUNDLED_TARGET, *FLAGS, "--exact", "never") as other:
        assert await model_id(target) != await model_id(other)


@pytest.mark.release
async def test_a_target_is_killed_and_another_goes_on_with_the_same_tokens(
    target: ServerProcess, alone: list[list[int]]
) -> None:
    async with target_server(BUNDLED_TARGET, *FLAGS) as other, pool_worker(BUNDLED_DRAFT, other.address):
        connection = ConnectionConfig(f"{target.address},{other.address}", 1, 60.0)
        async with connected(connection) as fleet:
            completer = FailoverCompleter(fleet, connection)
            others = asyncio.create_task(completed_by(completer, REQUESTS[1:]))
            completion = await interrupted(completer, REQUESTS[0], {20: target.process.kill})
        assert tokens_of([completion, *await others]) == alone
