"""A target's defaults for parameters that requests leave open: equal tokens from each server, over gRPC and HTTP."""

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
from tests.support.servers import complete, draft_server, fused_server, target_server

FLAGS = ("--temperature", "0.8", "--top_p", "0.9", "--top_k", "50", "--min_p", "0.01", "--max_new_tokens", "9")
SAMPLING = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01)
PROMPT = (2, 3, 5, 8, 13, 21)
SEED = 11


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(models: ModelDirectories) -> AsyncGenerator[dict[str, ServerProcess], None]:
    """Start a target with defaults, a draft worker that is given no defaults, and a fused server with the target's."""
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


async def explicit(target: ServerProcess) -> list[int]:
    """Return the target's tokens for a request that gives the value of every parameter itself."""
    return (await complete(target, CompletionRequest(PROMPT, SAMPLING, seed=SEED, max_new_tokens=9))).token_ids


async def generated(server: ServerProcess, request: pb.GenerateRequest) -> list[int]:
    async with open_channel(server.address) as channel:
        stream = rpc.GenerationServiceStub(channel).Generate(request, timeout=60)
        return [token_id async for message in stream for token_id in message.delta.token_ids]


@pytest.mark.parametrize("name", ["target", "draft", "fused"])
async def test_a_request_without_parameters_gets_the_defaults(servers: dict[str, ServerProcess], name: str) -> None:
    prompt = pb.TokenIds(ids=PROMPT)
    silent = pb.GenerateRequest(token_ids=prompt, sampling=pb.SamplingParams(seed=SEED))
    assert await generated(servers[name], silent) == await explicit(servers["target"])


@pytest.mark.parametrize("name", ["target", "draft", "fused"])
async def test_zero_is_not_unset(servers: dict[str, ServerProcess], name: str) -> None:
    """Temperature 0 means greedy decoding, whatever the operator's default is."""
    wanted = CompletionRequest(PROMPT, SamplingParams(), max_new_tokens=9)
    alone = SamplingParams(temperature=0.0, seed=1)
    greedy = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=alone.seed),
        max_new_tokens=9,
    )
    expected = (await complete(servers["target"], wanted)).token_ids
    assert await generated(servers[name], greedy) == expected
    assert expected != await explicit(servers["target"])


@pytest.mark.parametrize("name", ["target", "draft", "fused"])
async def test_a_body_without_parameters_gets_the_defaults(servers: dict[str, ServerProcess], name: str) -> None:
    """The target's defaults replace OpenAI's temperature 1 and 16 tokens; a value in the body replaces both."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{HTTP[name]}", timeout=60) as client:
        silent = (await client.post("/v1/completions", json={"prompt": list(PROMPT), "seed": SEED})).json()
        body = {"prompt": list(PROMPT), "seed": SEED, "max_tokens": 3}
        short = (await client.post("/v1/completions", json=body)).json()
    told = await complete(servers["target"], CompletionRequest(PROMPT, SAMPLING, seed=SEED, max_new_tokens=9))
    assert silent["choices"][0]["text"] == told.text
    assert short["usage"]["completion_tokens"] == 3


async def test_the_card_has_the_defaults(servers: dict[str, ServerProcess]) -> None:
    for server in servers.values():
        async with open_channel(server.address) as channel:
            card = await rpc.GenerationServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=60)
        assert (card.defaults.temperature, card.defaults.top_p, card.defaults.max_new_tokens) == (0.8, 0.9, 9)
        assert not card.defaults.HasField("repetition_penalty")
