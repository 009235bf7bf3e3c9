"""Tests of a target's default values for sampling parameters that requests leave out, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import httpx
import pytest
import pytest_asyncio

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import ServerProcess, free_port
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support.servers import complete_all, draft_server, fused_server, target_server

FLAGS = ("--temperature", "0.8", "--top_p", "0.9", "--top_k", "50", "--min_p", "0.01", "--max_new_tokens", "9")
SAMPLING = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01)
PROMPT = (2, 3, 5, 8, 13, 21)
SEED = 11


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(models: ModelDirectories) -> AsyncGenerator[dict[str, ServerProcess], None]:
    """Start a target, a server of both models with the same default parameters, and a draft server without any.

    The draft server lets the target verify, and gets the defaults from it. Yield the servers by name (target, draft,
    fused); their HTTP ports are put into HTTP.
    """
    async with AsyncExitStack() as stack:
        http = {name: free_port() for name in ("target", "draft", "fused")}
        ports = {name: ("--http_port", str(port)) for name, port in http.items()}
        target = await stack.enter_async_context(target_server(models.target, *FLAGS, *ports["target"]))
        draft_worker = draft_server(models.related, target, *ports["draft"])
        pair = fused_server(models.target, models.related, *FLAGS, *ports["fused"])
        draft, fused = await asyncio.gather(*map(stack.enter_async_context, (draft_worker, pair)))
        servers = {"target": target, "draft": draft, "fused": fused}
        HTTP.update(http)
        yield servers


HTTP: dict[str, int] = {}


async def generated(server: ServerProcess, request: pb.GenerateRequest) -> list[int]:
    async with open_channel(server.address) as channel:
        stream = rpc.GenerationServiceStub(channel).Generate(request, timeout=60)
        return [token_id async for message in stream for token_id in message.delta.token_ids]


@pytest.mark.parametrize("name", ["target", "draft", "fused"])
async def test_what_a_request_leaves_open_has_the_targets_default(servers: dict[str, ServerProcess], name: str) -> None:
    """A parameter that a request does not set gets the target's default, which the model's description has.

    An explicit 0 counts as set: temperature 0 means greedy decoding, whatever the target's default is.
    """
    server, ids = servers[name], pb.TokenIds(ids=PROMPT)
    drawn, greedy = await complete_all(
        servers["target"],
        [CompletionRequest(PROMPT, sampling, SEED, max_new_tokens=9) for sampling in (SAMPLING, SamplingParams())],
    )
    assert drawn.token_ids != greedy.token_ids
    silent = pb.GenerateRequest(token_ids=ids, sampling=pb.SamplingParams(seed=SEED))
    assert await generated(server, silent) == drawn.token_ids
    zero = pb.SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    assert await generated(server, pb.GenerateRequest(token_ids=ids, sampling=zero)) == greedy.token_ids
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{HTTP[name]}", timeout=60) as client:
        body = {"prompt": list(PROMPT), "seed": SEED}
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == drawn.text
        short = (await client.post("/v1/completions", json={**body, "max_tokens": 3})).json()
        assert short["usage"]["completion_tokens"] == 3
    async with open_channel(server.address) as channel:
        card = await rpc.GenerationServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=60)
    assert (card.defaults.temperature, card.defaults.top_p, card.defaults.max_new_tokens) == (0.8, 0.9, 9)
    assert not card.defaults.HasField("repetition_penalty")
