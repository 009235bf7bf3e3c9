"""Attack that sends hundreds of thousands of mutated messages to all gRPC methods, and mutated bodies by HTTP."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc
import httpx
from google.protobuf.message import Message

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from tests.suites.hostile.mutator import Mutator
from tests.suites.hostile.scene import BROKEN, NAME, RAW, Scene, Seen, dialled, note_status
from tests.support.raw_worker import after, below, proposing

NUM_FUZZERS = 4
CALL_S = 0.5
MESSAGES_A_STREAM = 200
GENERATION, VERIFICATION = "/specdec.v1.GenerationService/", "/specdec.v1.VerificationService/"
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models/x", "/nowhere")


async def fuzz(scene: Scene, seen: Seen, stop: asyncio.Event) -> None:
    """Send mutated messages to all servers until `stop` is set; count the statuses in `seen`."""
    grpc_fuzzers = [_fuzz_grpc(scene, seen, stop, number) for number in range(NUM_FUZZERS)]
    await asyncio.gather(*grpc_fuzzers, *(_fuzz_http(scene, seen, stop, port) for port in scene.http_ports))


async def _fuzz_grpc(scene: Scene, seen: Seen, stop: asyncio.Event, number: int) -> None:
    draw = random.Random(f"{scene.seed} {number}")
    mutator = Mutator(draw, vocab_size=scene.vocab_size)
    unary, streams = _unary_seeds(), _stream_seeds(scene)
    while not stop.is_set():
        server = draw.choice((scene.target, *scene.grpc_servers))
        with_streams = 0.8 if server == scene.target else 0.02  # others have no method that reads one
        async with dialled(server) as channel:
            request = scene.request(max_new_tokens=200, schedule=draw.choice((pb.SCHEDULE_SYNC, pb.SCHEDULE_ASYNC)))
            drafted = rpc.GenerationServiceStub(channel).Generate(request, timeout=20)
            for _ in range(50):
                if draw.random() >= with_streams:
                    method, seed = draw.choice(unary)
                    await _call(channel, method, [mutator.message(seed)], seen)
                else:
                    method, messages = draw.choice(streams)
                    await _call(channel, method, _disordered(mutator, draw, messages), seen)
            drafted.cancel()


def _unary_seeds() -> list[tuple[str, Message]]:
    sampling = pb.SamplingParams(temperature=0.8, seed=1, logit_bias=[pb.LogitBias(token_id=5, bias=1)])
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
    ids = pb.TokenIds(ids=[5, 6, 7])
    grammar = pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="[a-z]+")
    return [
        (f"{GENERATION}Generate", pb.GenerateRequest(text="x", sampling=sampling, max_new_tokens=3, stop=["y"])),
        (f"{GENERATION}Generate", pb.GenerateRequest(token_ids=ids, sampling=sampling, max_new_tokens=3, logprobs=2)),
        (f"{GENERATION}Generate", pb.GenerateRequest(chat=chat, max_new_tokens=3)),
        (f"{GENERATION}Generate", pb.GenerateRequest(text="x", max_new_tokens=3, grammar=grammar)),
        (f"{GENERATION}GetModel", pb.GetModelRequest()),
        (f"{GENERATION}Tokenize", pb.TokenizeRequest(text="x")),
        (f"{GENERATION}Tokenize", pb.TokenizeRequest(chat=chat)),
        (f"{GENERATION}Detokenize", pb.DetokenizeRequest(token_ids=[5, 6, 7])),
        ("/grpc.health.v1.Health/Check", pb.GetModelRequest()),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", pb.TokenizeRequest(text="x")),
    ]


def _stream_seeds(scene: Scene) -> list[tuple[str, list[Message]]]:
    """Return the streaming methods, each with a valid first message and a valid later one."""
    branches = [after(3, 5, 6), below(0, 7)]
    method = f"{VERIFICATION}Assist"
    return [
        (method, [scene.attach(2, is_private=is_private), proposing(NAME.hex(), *branches)])
        for is_private in (True, False)
    ]


def _disordered(mutator: Mutator, draw: random.Random, seeds: list[Message]) -> list[bytes]:
    """Return serialized messages of a stream: mostly a valid first one, then valid, mutated or misplaced ones.

    `seeds` are two valid messages: a first one of a stream, and a later one.
    """
    first, then = seeds
    messages = [first.SerializeToString()] if draw.random() < 0.8 else [mutator.message(draw.choice(seeds))]
    manner = draw.choice(("well", "well", "badly", "in any order"))
    for _ in range(draw.randrange(MESSAGES_A_STREAM)):
        if manner == "well" and draw.random() < 0.98:
            messages.append(_proposal(draw))
        else:
            messages.append(mutator.message(draw.choice(seeds) if manner == "in any order" else then))
    return messages


def _proposal(draw: random.Random) -> bytes:
    """Return a serialized message that proposes branches of random draft tokens after random tokens of the sequence."""
    branches = []
    for _ in range(draw.randrange(4)):
        where = {"parent_node" if draw.random() < 0.01 else "prefix_length": draw.randrange(4)}
        branches.append(pb.Branch(**where, token_ids=[draw.randrange(500) for _ in range(draw.randrange(1, 9))]))
    return proposing(NAME.hex(), *branches).SerializeToString()


async def _call(channel: Any, method: str, messages: list[bytes], seen: Seen) -> None:
    """Call a method, streaming or unary, with these messages; a unary call is a stream of one message."""
    call = channel.stream_stream(method, **RAW)(timeout=CALL_S)
    with suppress(*BROKEN):
        for message in messages:
            await call.write(message)
            seen["messages"] += 1
        await call.done_writing()
        while await call.read() != grpc.aio.EOF:
            pass
    note_status(seen, "fuzz", await call.code(), await call.details())


async def _fuzz_http(scene: Scene, seen: Seen, stop: asyncio.Event, port: int) -> None:
    draw = random.Random(f"{scene.seed} {port}")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        while not stop.is_set():
            headers = {"Content-Type": "application/json", "X-Deadline-S": "0.5"}
            try:
                response = await client.post(draw.choice(PATHS), content=body(draw), headers=headers)
                seen[f"http {response.status_code}"] += 1
            except httpx.HTTPError as exc:
                seen[f"http {type(exc).__name__}"] += 1
            seen["messages"] += 1


_BODY: dict[str, Any] = {
    "model": "target", "prompt": "x", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 1, "stop": ["y"], "seed": 1, "logit_bias": {"5": 1},
    "stream": True, "stream_options": {"include_usage": True}, "logprobs": 1, "tokens": [5, 6],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
}  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, 1e308, float("nan"), float("inf"), 10**30, "", "x", "\0", "\ud800", "a" * 2000,
    [], {}, [[]], [None] * 50, ["x"] * 2000, {"": {}}, {"a": {"b": {"c": []}}}, [1, "x", None], 2**31, 2**63,
)  # fmt: skip


def body(draw: random.Random) -> bytes:
    """Return a request body that is nearly right, nearly JSON, or neither."""
    chosen = {key: value for key, value in _BODY.items() if draw.random() < 0.4}
    document = {**chosen, **{key: draw.choice(_VALUES) for key in _keys(draw, chosen)}}
    data = json.dumps(document).encode()
    if draw.random() < 0.2:
        place = draw.randrange(len(data))
        data = data[:place] + draw.randbytes(draw.choice((0, 1, 9))) + data[place + draw.choice((0, 1, 200)) :]
    return data


def _keys(draw: random.Random, chosen: Iterable[str]) -> list[str]:
    return [key for key in (*chosen, *_BODY, "user", "best_of", "x") if draw.random() < 0.08]
