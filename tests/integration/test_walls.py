"""Tests of attacks on a target: during each one, an ordinary client must still get its tokens.

The target has a script instead of a model, in this process, with real sockets; tests/unit checks each limit alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.grpc_comm import guard
from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.errors import Status, status_of
from specdec.grpc_comm.guard import Gate
from specdec.grpc_comm.server import Server
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.calls.access import Access
from specdec.inference.workers.calls.admitting import admission
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completion import ModelCard
from specdec.inference.workers.drafting import service
from specdec.inference.workers.drafting.service import VerificationServicer
from tests.support.bombs import BOMBS
from tests.support.models import tiny_tokenizer
from tests.support.ports import listening
from tests.support.raw_worker import OWN_CONNECTION, after, end_of, raw_worker
from tests.support.scripted import VOCAB_SIZE, ScriptedDecoder, tokens_at, until

DEAF: list[tuple[str, int]] = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 5)]
HARD_OF_HEARING: list[tuple[str, int]] = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64)]
SENDS_ANYTHING: list[tuple[str, int]] = [("grpc.max_send_message_length", -1)]
RAW: dict[str, Any] = {"request_serializer": bytes, "response_deserializer": bytes}
SLOW_S = 3.0
"""Most seconds that a health check may take during an attack; without the tested limits it took 5 s to 50 s."""
WORDS = Vocabulary("f", VOCAB_SIZE)
PROMPT: dict[str, Any] = {"token_ids": pb.TokenIds(ids=[1, 2, 3]), "ignore_eos": True}


@dataclass
class Target:
    """A target in this process with a script instead of a model: its gRPC server, its engine, and its draft workers."""

    server: Server
    engine: TargetEngine
    pool: DraftPool

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


@asynccontextmanager
async def serving(
    num_slots: int = 2,
    *,
    idle_timeout_s: float = 60.0,
    stall_timeout_s: float = 60.0,
    auth_file: Path | None = None,
    credentials: grpc.ServerCredentials | None = None,
    tokenizer: Tokenizer | None = None,
) -> AsyncGenerator[Target, None]:
    engine = TargetEngine(ScriptedDecoder(num_slots=num_slots), EngineLimits(max_waiting=0))
    engine.start()
    pool = DraftPool(engine, idle_timeout_s=idle_timeout_s)
    completer = LocalCompleter(pool, Tokenizer(tiny_tokenizer(), frozenset()))
    generation = GenerationServicer(completer, ModelCard("tiny", "target", engine.max_length, VOCAB_SIZE, "f"))
    gate = Gate(credentials, admit=admission(Access(auth_file)), stall_timeout_s=stall_timeout_s)
    async with listening(VerificationServicer(pool, WORDS, tokenizer), generation, gate=gate) as server:
        try:
            yield Target(server, engine, pool)
        finally:
            await engine.stop()


def dialled(target: Target, options: list[tuple[str, int]]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target.address, options=options)


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
async def test_one_packet_stops_no_other_request(bomb: bytes) -> None:
    """A small compressed message that unpacks to a huge one is refused, and delays no other request.

    Regression: 10 KB of gzip with 5 million empty chat messages froze a target for 50 s, and took more than 5 GB.
    """
    async with serving() as target, open_channel(target.address) as good, dialled(target, SENDS_ANYTHING) as bad:
        watching = asyncio.create_task(worst_health(good))
        method = "/specdec.v1.GenerationService/Generate"
        call: Any = bad.unary_stream(method, **RAW)(bomb, compression=grpc.Compression.Gzip, timeout=60)
        code = await call.code()
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert await tokens(good) == tokens_at(3, 40)
        watching.cancel()
        assert (await watching) < SLOW_S


async def worst_health(channel: grpc.aio.Channel) -> float:
    """Send one health check after another until cancelled; return the most seconds that one took."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    worst = 0.0
    try:
        while True:
            began = time.monotonic()
            await stub.Check(health_pb2.HealthCheckRequest())
            worst = max(worst, time.monotonic() - began)
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        return worst


async def tokens(channel: grpc.aio.Channel, **fields: Any) -> list[int]:
    """Send an ordinary request, with `fields` changed; return the token ids of its answer."""
    request = pb.GenerateRequest(**PROMPT, max_new_tokens=40, **fields)
    call = rpc.GenerationServiceStub(channel).Generate(request, timeout=60)
    return [token_id async for message in call for token_id in message.delta.token_ids]


async def test_a_client_that_reads_nothing_loses_its_slot() -> None:
    """A client that reads nothing of its answer loses its slot at the target, even if its draft worker is stuck too.

    Regression: the idle time-out waited for a write to the stuck draft worker, and the only slot stayed taken.
    """
    async with (
        serving(1, idle_timeout_s=0.5, stall_timeout_s=1.5) as target,
        open_channel(target.address) as good,
        raw_worker(target.address, options=DEAF) as deaf,
    ):
        session = deaf.request(pb.GenerateRequest(**PROMPT, max_new_tokens=900, schedule=pb.SCHEDULE_SYNC)).send()
        await until(lambda: target.engine.num_running == 1)
        async with asyncio.timeout(60):
            while target.engine.num_running:  # noqa: ASYNC110 - whatever frees it
                await asyncio.sleep(0.01)
        assert await tokens(good) == tokens_at(3, 40)
        session.call.cancel()


async def test_late_branches_by_the_megabyte_cost_little() -> None:
    """Megabytes of draft tokens for positions whose tokens are final already take little memory.

    Regression: 5 MB of them took 1.2 GB.
    """
    async with serving() as target, raw_worker(target.address) as worker:
        ids = [5] * 250
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_new_tokens=300, schedule=pb.SCHEDULE_SYNC)
        session, late = worker.request(request).send(), [after(0, *ids)] * 16
        for _ in range(100):
            await session.propose(*late)
        assert await tokens(worker.channel) == tokens_at(3, 40)
        (running,) = target.engine._sessions()
        assert len(running.sources.tree._nodes) <= 4096
        await session.propose(*late, *late)
        code, details = await end_of(worker.call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "draft tokens of one message exceed 4096" in details
        assert await session.rest() == tokens_at(250, 300)


SILENT = (
    "/specdec.v1.VerificationService/Assist",
    "/specdec.v1.GenerationService/Generate",
    "/specdec.v1.GenerationService/GetModel",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


@pytest.mark.parametrize("method", SILENT)
async def test_a_first_message_that_never_comes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose first message does not come within a time limit is ended; gRPC itself would wait without end."""
    monkeypatch.setattr(guard, "FIRST_MESSAGE_S", 0.3)
    async with serving() as target, open_channel(target.address) as channel:
        call = channel.stream_stream(method, **RAW)()
        async with asyncio.timeout(60):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("method", SILENT)
async def test_a_call_that_ends_without_a_message(method: str) -> None:
    async with serving() as target, open_channel(target.address) as channel:
        call = channel.stream_stream(method, **RAW)(timeout=60)
        await call.done_writing()
        is_stream_of_any = method.endswith("ServerReflectionInfo")  # of which none is a number too
        assert await call.code() is (grpc.StatusCode.OK if is_stream_of_any else grpc.StatusCode.INVALID_ARGUMENT)


async def test_a_pool_worker_that_reads_nothing_is_let_go() -> None:
    """A draft worker of the pool that does not read its messages is removed from the pool.

    Regression: messages to such a worker piled up as long as it answered pings, and its requests got no draft tokens.
    """
    async with (
        serving(stall_timeout_s=1.5) as target,
        open_channel(target.address) as good,
        dialled(target, HARD_OF_HEARING) as deaf,
    ):
        call = rpc.VerificationServiceStub(deaf).Assist()
        attach = pb.Attach(protocol_version=1, tokenizer_fingerprint="f", vocab_size=VOCAB_SIZE, num_slots=4096)
        await call.write(pb.AssistRequest(attach=attach))
        await until(lambda: len(target.pool._workers) == 1)
        async with asyncio.timeout(60):
            while target.pool._workers:
                assert await tokens(good) == tokens_at(3, 40)
        call.cancel()


async def test_silent_calls_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds of calls that send no message, all above a limit are refused, and other requests are not delayed.

    Regression: silent calls were unlimited, and each took 20 KB and time of every full garbage collection.
    """
    monkeypatch.setattr(guard, "FIRST_MESSAGE_S", 60.0)
    num_calls = 700
    async with serving() as target, AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        calls: list[Any] = []
        for _ in range(7):
            channel = await stack.enter_async_context(dialled(target, options))
            calls += [channel.stream_stream(SILENT[len(calls) % len(SILENT)], **RAW)() for _ in range(num_calls // 7)]
        good = await stack.enter_async_context(open_channel(target.address))
        watching = asyncio.create_task(worst_health(good))
        assert await tokens(good) == tokens_at(3, 40)
        ended = [asyncio.create_task(call.code()) for call in calls]
        await until(lambda: sum(task.done() for task in ended) >= num_calls - guard.MAX_WAITING)
        watching.cancel()
        codes = {task.result() for task in ended if task.done()}
        for call in calls:
            call.cancel()
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert (await watching) < SLOW_S


async def test_a_burst_ends_in_answers_or_in_refusals_with_a_hint() -> None:
    """Each of 2,000 simultaneous requests is answered, or refused with the time after which to try again.

    Regression: above 1,000, gRPC's own limit ended calls by CANCELLED, without a message, and clients took the server
    for lost.
    """
    request = pb.GenerateRequest(**PROMPT, max_new_tokens=2)
    async with serving() as target, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(dialled(target, [*OWN_CONNECTION])) for _ in range(10)]
        for channel in channels:
            await channel.channel_ready()

        async def outcome(channel: grpc.aio.Channel) -> Status | None:
            try:
                async for _ in rpc.GenerationServiceStub(channel).Generate(request):
                    pass
            except grpc.aio.AioRpcError as exc:
                return status_of(exc)
            return None

        ends = await asyncio.gather(*(outcome(channel) for channel in channels for _ in range(200)))
    refused = [end for end in ends if end is not None]
    assert len(refused) < len(ends)
    assert {end.code for end in refused} <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(end.retry_after_s for end in refused)


async def test_a_stalled_stream_sends_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target sends pings as messages on a draft worker's stream while it has nothing else to send.

    Regression: load balancers that ignore HTTP/2 pings ended silent streams after 30 s to 60 s, and emptied the pool.
    """
    monkeypatch.setattr(service, "HEARTBEAT_S", 0.02)
    async with serving() as target, raw_worker(target.address, is_private=False) as worker:
        assert [(await worker.call.read()).WhichOneof("message") for _ in range(3)] == [None, None, None]


async def test_a_worker_reports_its_present_room() -> None:
    """A draft worker of the pool may report a new number of sequences (slots) that it has room for.

    The number 0 is invalid, and ends the worker's stream, but no request.
    """
    async with serving() as target, raw_worker(target.address, is_private=False) as sender:
        (worker,) = target.pool._workers
        await sender.call.write(pb.AssistRequest(slots=pb.AssistSlots(num_slots=7)))
        await until(lambda: worker.num_slots == 7)
        await sender.call.write(pb.AssistRequest(slots=pb.AssistSlots(num_slots=0)))
        assert await sender.call.code() == grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: not target.pool._workers)
        assert await tokens(sender.channel) == tokens_at(3, 40)
