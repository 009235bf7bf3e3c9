"""Attacks of the hostile suite over gRPC, HTTP/2 and TCP; each counts the statuses of its calls in `seen`."""

from __future__ import annotations

import asyncio
import json
import os
import random
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from tests.suites.hostile.scene import ANY_SIZE, BROKEN, DEAF, RAW, Recipe, Scene, Seen, dialled, observed
from tests.support.bombs import BOMBS, field
from tests.support.raw_worker import after, proposing, raw_worker

GENERATE = "/specdec.v1.GenerationService/Generate"
ASSIST = "/specdec.v1.VerificationService/Assist"
SILENT = (
    ASSIST,
    GENERATE,
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
HEADER_BYTES_PER_S = 256 * 1024
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, RESET = (
    bytes([0, 0, size, kind, 0, 0, 0, 0, stream]) for size, kind, stream in ((0, 4, 0), (8, 6, 0), (4, 3, 1))
)


async def gzip_bombs(scene: Scene, seen: Seen) -> None:
    """Attack: send messages of 10 KB that unpack to millions of empty elements."""
    for server in scene.grpc_servers:
        async with dialled(server, ANY_SIZE) as channel:
            for bomb in BOMBS.values():
                call = channel.unary_stream(GENERATE, **RAW)(bomb, compression=grpc.Compression.Gzip, timeout=30)
                await observed(call, seen, "bomb")


async def bombs_on_streams(scene: Scene, seen: Seen) -> None:
    """Attack: attach draft workers that propose 60 million tokens in one compressed message."""
    ids = field(2, field(2, field(1, b"\x08\x03" + field(3, b"\x01" * 60_000_000))))
    async with dialled(scene.target, ANY_SIZE) as channel:
        for is_private in (True, False):
            call = channel.stream_stream(ASSIST, **RAW)(compression=grpc.Compression.Gzip, timeout=30)
            with suppress(*BROKEN):
                await call.write(scene.attach(1, is_private=is_private).SerializeToString())
                await call.write(ids)
            await observed(call, seen, "bomb")


async def late_branches(scene: Scene, seen: Seen) -> None:
    """Attack: propose megabytes of draft tokens for positions whose tokens are final already."""
    prompt = [5] * 250
    branches = [after(0, *prompt)] * 16
    async with raw_worker(scene.target) as worker:
        session = worker.request(scene.request(token_ids=pb.TokenIds(ids=prompt))).send()
        with suppress(*BROKEN):
            for _ in range(100):
                await session.propose(*branches)
            await session.propose(*branches * 64)
            await observed(session.call, seen, "branches")
        await observed(worker.call, seen, "branches")


async def early_names(scene: Scene, seen: Seen) -> None:
    """Attack: send megabytes of draft tokens for requests that never come."""
    branches = [after(3, *[5] * 250)] * 16
    async with raw_worker(scene.target) as worker:
        for number in range(2000):
            await worker.call.write(proposing(f"{number}" * 100, *branches))
            seen["early names"] += 1


async def flood(scene: Scene, seen: Seen) -> None:
    """Attack: send many more requests at once than the server can run and queue."""
    for server in scene.grpc_servers:
        async with dialled(server) as channel:
            stub = rpc.GenerationServiceStub(channel)
            request = pb.GenerateRequest(text="flood", max_new_tokens=4)
            await asyncio.gather(*(observed(stub.Generate(request, timeout=20), seen, "flood") for _ in range(200)))


async def long_texts(scene: Scene, seen: Seen) -> None:
    """Attack: let a server tokenize the longest text that it accepts, 40 times at once."""
    async with dialled(scene.target) as channel:
        stub = rpc.GenerationServiceStub(channel)

        async def one() -> None:
            try:
                await stub.Tokenize(pb.TokenizeRequest(text="lorem ipsum " * 10_000), timeout=20)
                seen["text OK"] += 1
            except grpc.aio.AioRpcError as exc:
                seen[f"text {exc.code().name}"] += 1

        await asyncio.gather(*(one() for _ in range(40)))


async def dear_grammars(scene: Scene, seen: Seen) -> None:
    """Attack: send short grammars that take long to compile."""
    together = json.dumps({"allOf": [{"type": "string", "pattern": f"[a-z]{{{i}}}"} for i in range(1, 40)]})
    texts = [together, "(a{1,1000}){1,1000}", "(" * 3000, "((((a|b)*c)*d)*e)*" * 50, "[" * 65_536, "\\p{L}{1,60000}x"]
    async with dialled(scene.fused) as channel:
        stub = rpc.GenerationServiceStub(channel)
        for text in texts:
            for kind in (pb.GRAMMAR_KIND_REGEX, pb.GRAMMAR_KIND_GRAMMAR, pb.GRAMMAR_KIND_JSON_SCHEMA):
                request = pb.GenerateRequest(text="x", max_new_tokens=2, grammar=pb.Grammar(kind=kind, text=text))
                await observed(stub.Generate(request, timeout=10), seen, "grammar")


async def dear_sampling(scene: Scene, seen: Seen) -> None:
    """Attack: ask for what costs Python time in each pass: a penalty, 1024 biases, 64 draft tokens, logprobs."""
    biases = [pb.LogitBias(token_id=token_id, bias=0.5) for token_id in range(1024)]
    sampling = pb.SamplingParams(temperature=1, seed=1, repetition_penalty=1.01, logit_bias=biases)
    request = pb.GenerateRequest(
        text="x", sampling=sampling, max_new_tokens=100, gamma=64, logprobs=20, ignore_eos=True
    )
    async with dialled(scene.target) as channel:
        stub = rpc.GenerationServiceStub(channel)
        await asyncio.gather(*(observed(stub.Generate(request, timeout=10), seen, "dear") for _ in range(2)))


async def wide_rounds(scene: Scene, seen: Seen) -> None:
    """Attack: with two draft workers, propose as many wrong draft tokens as a server takes, for every pass."""
    await asyncio.gather(_wide_round(scene, seen), _wide_round(scene, seen))


async def _wide_round(scene: Scene, seen: Seen) -> None:
    async with raw_worker(scene.target) as worker:
        session, length = worker.request(scene.request(max_new_tokens=100)).send(), 3
        while True:
            await session.propose(after(length, *[scene.vocab_size - 1] * 256))
            if (delta := await session.delta()) is None:
                break
            length = max(length, delta.position + len(delta.token_ids))
        await observed(session.call, seen, "wide rounds")


async def dear_prompts(scene: Scene, seen: Seen) -> None:
    """Attack: ask for 20 log-probabilities of every prompt token, and for the text of 260,000 token ids."""
    ids = [30 + index * 7 % 2000 for index in range(1900)]
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), prompt_logprobs=20, max_new_tokens=1)
    for server in scene.grpc_servers:
        async with dialled(server) as channel:
            stub = rpc.GenerationServiceStub(channel)
            await observed(stub.Generate(request, timeout=10), seen, "scored")
            with suppress(*BROKEN):
                await stub.Detokenize(pb.DetokenizeRequest(token_ids=[300] * 260_000), timeout=10)


async def leavers(scene: Scene, seen: Seen) -> None:
    """Attack: cancel a thousand calls as soon as they are made; each is an HTTP/2 reset."""
    async with dialled(scene.fused) as channel:
        stub = rpc.GenerationServiceStub(channel)
        for _ in range(1000):
            call = stub.Generate(pb.GenerateRequest(text="x", max_new_tokens=50))
            await asyncio.sleep(0)
            call.cancel()
            seen["cancelled"] += 1


async def metadata(scene: Scene, seen: Seen) -> None:
    """Attack: send gRPC metadata of up to a megabyte."""
    async with dialled(scene.target, [("grpc.max_metadata_size", 1 << 24)]) as channel:
        stub = rpc.GenerationServiceStub(channel)
        for size in (100, 10_000, 100_000, 1_000_000):
            call = stub.Generate(
                pb.GenerateRequest(text="x", max_new_tokens=1), metadata=[("x", "y" * size)], timeout=5
            )
            await observed(call, seen, "metadata")


async def frames(scene: Scene, seen: Seen) -> None:
    """Attack: write HTTP/2 frames by hand: floods of settings, pings and resets, and random bytes."""
    draw = random.Random(scene.seed)
    floods = [SETTINGS * 5000, (PING + bytes(8)) * 5000, (RESET + bytes(4)) * 5000]
    floods += [bytes([0, 0, 64, draw.randrange(256), draw.randrange(256)]) + draw.randbytes(68) for _ in range(50)]
    for index, data in enumerate(floods):
        port = int(scene.grpc_servers[index % 3].rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(OSError, TimeoutError):
            writer.write(PREFACE + SETTINGS + data)
            async with asyncio.timeout(0.2):
                await reader.read()
        seen["frames"] += 1
        writer.close()


async def endless_headers(scene: Scene, seen: Seen) -> None:
    """Attack: send a call's HTTP/2 headers without end, at the rate of a slow uplink.

    gRPC reads them all: none of its options limits the frames of one header block. A faster rate would delay other
    connections.
    """
    continuation = bytes([0, 64, 0, 9, 0, 0, 0, 0, 1]) + bytes([0, 1, 97, 1, 98]) * 3276 + bytes(4)
    for server in scene.grpc_servers:
        _, writer = await asyncio.open_connection("127.0.0.1", int(server.rpartition(":")[2]))
        with suppress(OSError):
            writer.write(PREFACE + SETTINGS + bytes([0, 0, 0, 1, 0, 0, 0, 0, 1]))
            for _ in range(32):
                writer.write(continuation)
                await asyncio.sleep(len(continuation) / HEADER_BYTES_PER_S)
        seen["endless headers"] += 1
        writer.transport.abort()


async def churn(scene: Scene, seen: Seen) -> None:
    """Attack: open connections, and close them in the middle of the HTTP/2 preface or after it."""
    for index in range(600):
        port = int(scene.grpc_servers[index % 3].rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((PREFACE + SETTINGS)[: index % 40])
        writer.transport.abort()
        seen["connections"] += 1


async def lying_worker(scene: Scene, seen: Seen) -> None:
    """Attack: attach a draft worker to the pool, and propose tokens for unknown or unnamed requests, or invalid ids."""
    proposals = [
        pb.AssistPropose(session_id="unknown", propose=pb.Propose(branches=[after(1, 1)])),
        pb.AssistPropose(),
        pb.AssistPropose(session_id="x" * 100_000),
    ]
    for _ in range(20):
        with suppress(TimeoutError, *BROKEN):
            async with raw_worker(scene.target, num_slots=4096, is_private=False) as worker, asyncio.timeout(0.3):
                for message in proposals:
                    await worker.call.write(pb.AssistRequest(propose=message))
                await _propose_for_all_comers(worker.call, scene)
        seen["lies"] += 1


async def _propose_for_all_comers(call: Any, scene: Scene) -> None:
    for _ in range(20):
        message = await call.read()
        if message == grpc.aio.EOF:
            return
        if message.WhichOneof("message") == "open":
            length = len(message.open.open.prompt_token_ids)
            await call.write(proposing(message.open.session_id, after(length, *[scene.vocab_size - 1] * 16)))


async def deaf_sessions(scene: Scene, seen: Seen) -> None:
    """Attack: send requests, read nothing and propose nothing; each takes a slot until the target ends it."""
    schedules = (pb.SCHEDULE_SYNC, pb.SCHEDULE_ASYNC)
    while True:
        async with raw_worker(scene.target, options=DEAF) as worker:
            request = scene.request(schedule=schedules[seen["deaf session"] % 2])
            await worker.request(request).send().call.code()
            seen["deaf session"] += 1


async def deaf_readers(scene: Scene, seen: Seen) -> None:
    """Attack: ask a server with only a draft model for a long answer with log-probabilities, and never read it."""
    while True:
        async with dialled(scene.draft, DEAF) as channel:
            request = pb.GenerateRequest(text="x", max_new_tokens=500, logprobs=20, ignore_eos=True)
            call = rpc.GenerationServiceStub(channel).Generate(request, timeout=20)
            await asyncio.sleep(15)
            call.cancel()
            seen["deaf reader"] += 1


async def finished_and_unread(scene: Scene, seen: Seen) -> None:
    """Attack: ask for 16 answers on one connection, and read none of them."""
    async with dialled(scene.target) as channel:
        stub = rpc.GenerationServiceStub(channel)
        calls = []
        for _ in range(16):
            request = pb.GenerateRequest(text="x", max_new_tokens=200, logprobs=20, ignore_eos=True)
            calls.append(stub.Generate(request, timeout=60))
            await asyncio.sleep(2)
        await asyncio.sleep(60)


async def deaf_askers(scene: Scene, seen: Seen) -> None:
    """Attack: ask for unary answers of several megabytes, and read none of them."""
    asked = pb.DetokenizeRequest(token_ids=[300] * 260_000).SerializeToString()
    while True:
        async with dialled(scene.fused, DEAF) as channel:
            ask = channel.unary_stream("/specdec.v1.GenerationService/Detokenize", **RAW)
            calls = [ask(asked, compression=grpc.Compression.Gzip) for _ in range(20)]
            await asyncio.sleep(40)
            seen["unread answers"] += len(calls)


async def deaf_watchers(scene: Scene, seen: Seen) -> None:
    """Attack: watch the servers' health in more calls than they allow, without reading."""
    async with AsyncExitStack() as stack:
        calls = []
        for index in range(15):  # a connection has 256 streams, a server 256 places
            channel = await stack.enter_async_context(dialled(scene.grpc_servers[index % 3], DEAF))
            stub: Any = health_pb2_grpc.HealthStub(channel)
            calls += [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(250)]
        seen["watchers"] += len(calls)
        await asyncio.Event().wait()


async def silent_worker(scene: Scene, seen: Seen) -> None:
    """Attack: attach a draft worker to the pool that offers to draft for 4096 requests, and drafts for none."""
    while True:
        async with raw_worker(scene.target, num_slots=4096, is_private=False) as worker:
            await observed(worker.call, seen, "silent worker")


async def deaf_worker(scene: Scene, seen: Seen) -> None:
    """Attack: attach a draft worker to the pool that never reads its messages."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64)]
    while True:
        async with raw_worker(scene.target, options=options, num_slots=4096, is_private=False) as worker:
            await worker.call.code()
            seen["deaf worker"] += 1


async def silent_calls(scene: Scene, seen: Seen) -> None:
    """Attack: open calls of every method, over many connections, without ever sending a message."""
    while True:
        for server in scene.grpc_servers:
            async with AsyncExitStack() as stack:
                calls = []
                for index in range(10):
                    channel = await stack.enter_async_context(dialled(server))
                    open_one = channel.stream_stream(SILENT[index % len(SILENT)], **RAW)
                    calls += [open_one(timeout=20) for _ in range(100)]
                await asyncio.gather(*(observed(call, seen, "silent call") for call in calls))


async def half_open(scene: Scene, seen: Seen) -> None:
    """Attack: open connections to gRPC ports, and send nothing, or a part of the HTTP/2 preface."""
    writers = []
    for index in range(300):
        port = int(scene.grpc_servers[index % 3].rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE[: index % 24] + os.urandom(index % 2))
        writers.append(writer)
    seen["half-open"] += len(writers)
    await asyncio.Event().wait()


QUICK: tuple[Recipe, ...] = (
    gzip_bombs, bombs_on_streams, late_branches, early_names, flood, long_texts, dear_prompts, dear_grammars,
    dear_sampling, wide_rounds, leavers, metadata, frames, endless_headers, churn, lying_worker,
)  # fmt: skip
"""Attacks that end by themselves; they run one after another."""
PATIENT: tuple[Recipe, ...] = (
    deaf_sessions, deaf_readers, finished_and_unread, deaf_askers, deaf_watchers, silent_worker, deaf_worker,
    silent_calls, half_open,
)  # fmt: skip
"""Attacks that run all the time, each again and again, beside those of `QUICK`."""
