"""Peers that were not updated: a client, a draft worker and a server of 2026-11-21 work with today's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from grpc_comm.channel import open_channel
from inference.config import ROOT
from inference.request import SamplingParams
from inference.serving.processes import ServerProcess
from inference.workers.completion import CompletionRequest
from inference.workers.remote import RemoteCompleter
from tests.support.servers import complete
from tests.support.yesterday import WIRE, old
from tests.test_codegen import BIN, run

PROMPT = (2, 3, 5, 8, 13, 21)
GENERATION = "/specdec.v1.GenerationService"
VERIFICATION = "/specdec.v1.VerificationService"


def test_nothing_on_the_wire_is_broken() -> None:
    """As `buf breaking` sees it, against the descriptors of then."""
    run(BIN / "buf", "breaking", "--against", WIRE, directory=ROOT / "protos")


def generate(channel: grpc.aio.Channel, request: Any) -> Any:
    call = channel.unary_stream(
        f"{GENERATION}/Generate",
        request_serializer=old.GenerateRequest.SerializeToString,
        response_deserializer=old.GenerateResponse.FromString,
    )
    return call(request, timeout=60)


async def old_client(address: str, **sampling: Any) -> list[int]:
    request = old.GenerateRequest(
        token_ids=old.TokenIds(ids=PROMPT), sampling=old.SamplingParams(**sampling), max_new_tokens=12
    )
    async with open_channel(address) as channel:
        return [token_id async for message in generate(channel, request) for token_id in message.delta.token_ids]


SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.8, top_k=40, presence_penalty=0.5)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
async def test_a_client_of_then(
    target: ServerProcess, topologies: dict[str, ServerProcess], sampling: SamplingParams
) -> None:
    """What it leaves at zero, it does not send; that still means zero to a server without defaults of its own."""
    said = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "presence_penalty": sampling.presence_penalty,
        "seed": 7,
    }
    expected = await complete(target, CompletionRequest(PROMPT, sampling, seed=7, max_new_tokens=12))
    for server in (target, topologies["related"], topologies["fused"]):
        assert await old_client(server.address, **said) == expected.token_ids


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
async def test_a_draft_worker_of_then(target: ServerProcess, sampling: SamplingParams) -> None:
    """Rounds without any draft token; the target's own come back, in order."""
    said = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "presence_penalty")}
    expected = await complete(target, CompletionRequest(PROMPT, sampling, seed=7, max_new_tokens=12))
    assert await old_draft(target.address, max_new_tokens=12, seed=7, **said) == expected.token_ids


async def old_draft(address: str, *, max_new_tokens: int, **sampling: Any) -> list[int]:
    card_of = {
        "request_serializer": old.GetModelRequest.SerializeToString,
        "response_deserializer": old.GetModelResponse.FromString,
    }
    async with open_channel(address) as channel:
        card = await channel.unary_unary(f"{GENERATION}/GetModel", **card_of)(old.GetModelRequest(), timeout=10)
        opening = old.Open(
            protocol_version=1,
            tokenizer_fingerprint=card.tokenizer_fingerprint,
            vocab_size=card.vocab_size,
            prompt_token_ids=PROMPT,
            sampling=old.SamplingParams(**sampling),
            max_new_tokens=max_new_tokens,
            stop_at_eos=True,
        )
        call = channel.stream_stream(
            f"{VERIFICATION}/Verify",
            request_serializer=old.VerifyRequest.SerializeToString,
            response_deserializer=old.VerifyResponse.FromString,
        )(timeout=60)
        return await rounds(call, opening)


async def rounds(call: Any, opening: Any) -> list[int]:
    await call.write(old.VerifyRequest(open=opening))
    assert (await call.read()).WhichOneof("message") == "opened"
    token_ids: list[int] = []
    while True:
        await call.write(old.VerifyRequest(propose=old.Propose()))
        commit = (await call.read()).commit
        assert commit.position == len(PROMPT) + len(token_ids)
        token_ids.extend(commit.token_ids)
        if commit.finish_reason:
            return token_ids


@asynccontextmanager
async def old_server() -> AsyncGenerator[str, None]:
    """Answers every request with the ids that it was asked with, as a server of then would; HOST:PORT."""

    async def echo(request: Any, context: Any) -> AsyncIterator[Any]:
        yield old.GenerateResponse(started=old.Started(num_prompt_tokens=len(request.token_ids.ids), seed=5))
        timings = old.Timings(compute_us=9, bytes_up=3)
        yield old.GenerateResponse(delta=old.Delta(token_ids=request.token_ids.ids, text="x", timings=timings))
        yield old.GenerateResponse(finished=old.GenerationFinished(reason=2))

    async def card(request: Any, context: Any) -> Any:
        return old.GetModelResponse(name="then", topology="target", max_length=64, vocab_size=288)

    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            echo, old.GenerateRequest.FromString, old.GenerateResponse.SerializeToString
        ),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            card, old.GetModelRequest.FromString, old.GetModelResponse.SerializeToString
        ),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GENERATION[1:], handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_server_of_then() -> None:
    async with old_server() as address, open_channel(address) as channel:
        completer = RemoteCompleter(channel, address, deadline_s=60)
        card = await completer.model()
        assert (card.name, card.max_length, card.chat_template) == ("then", 64, None)
        assert not card.features, "so a gateway does not send it tools, which it would ignore"
        answer = await asyncio.wait_for(complete_with(completer), 60)
    assert answer == list(PROMPT)


async def complete_with(completer: RemoteCompleter) -> list[int]:
    request = CompletionRequest(PROMPT, max_new_tokens=12)
    return [token_id async for event in completer.complete(request) for token_id in getattr(event, "token_ids", ())]
