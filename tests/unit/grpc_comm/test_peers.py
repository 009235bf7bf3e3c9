"""Limits on messages that a gRPC peer sends, and the end of calls whose peer does not read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.grpc_comm import health
from specdec.grpc_comm.call import Call
from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.guard import Gate
from specdec.grpc_comm.health import LIVENESS, NOT_SERVING, READINESS, SERVING
from specdec.grpc_comm.options import MIN_REQUEST_BYTES, max_request_bytes
from specdec.grpc_comm.server import Server
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from tests.support.ports import listening

DEAF: list[tuple[str, int]] = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 5)]
"""Options of a client's channel that cannot receive an answer: its HTTP/2 receive window is five bytes."""
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
STALL_S = 0.3
LIMIT = 1000
REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
RAW: dict[str, Any] = {"request_serializer": bytes, "response_deserializer": bytes}


class TalkativeServicer(rpc.GenerationServiceServicer):  # type: ignore[misc]
    """Servicer that streams without end, and counts its streams."""

    service_name = "specdec.v1.GenerationService"
    max_request_bytes = LIMIT

    def __init__(self) -> None:
        self.num_streams = 0
        self.ended = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_GenerationServiceServicer_to_server(self, server)
        handler: Any = grpc.stream_stream_rpc_method_handler(self.read, pb.AssistRequest.FromString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.service_name, {"Read": handler}),))

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:
        self.num_streams += 1
        try:
            while True:
                await call.write(pb.GenerateResponse(delta=pb.Delta(text="x" * 10_000)))
        finally:
            self.num_streams -= 1
            self.ended.set()

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        task: Any = asyncio.current_task()
        task.add_done_callback(lambda _: self.ended.set())  # with the call, which has the task to itself
        return pb.DetokenizeResponse(text="x" * 10_000)

    async def read(self, _: object, call: Call) -> None:
        while await call.read() != grpc.aio.EOF:
            pass


@asynccontextmanager
async def serving() -> AsyncGenerator[tuple[TalkativeServicer, Server], None]:
    servicer = TalkativeServicer()
    async with listening(servicer, status_of=lambda _: None, gate=Gate(stall_timeout_s=STALL_S)) as server:
        yield servicer, server


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the tracebacks in the log, without those of asyncio, which gRPC's poller causes in closed event loops."""
    return [record.getMessage() for record in caplog.records if record.exc_info and record.name != "asyncio"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"\x0a\x80\x10" + b"x" * 2048, ["2051 bytes", f"limit of {LIMIT}"]),
        (b"\xff\xff\xff", ["3 bytes", "not a message"]),
    ],
    ids=["too long", "malformed"],
)
@pytest.mark.parametrize("method", ["Generate", "Read"])
async def test_refuses_what_it_does_not_even_parse(
    method: str, message: bytes, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A malformed message is refused as an invalid argument, with no traceback in the log.

    Regression: malformed messages were UNKNOWN or INTERNAL with a traceback each: 3.9 MB of log for 20,000.
    """
    async with serving() as (servicer, server), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        path = f"/{servicer.service_name}/{method}"
        if method == "Generate":
            call: Any = channel.unary_stream(path, **RAW)(message, timeout=60)
        else:
            call = channel.stream_stream(path, **RAW)(timeout=60)
            await call.write(message)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = await call.details()
        assert all(word in details for word in words)
    assert not tracebacks(caplog)


@pytest.mark.parametrize("method", ["grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch", REFLECTION])
async def test_health_and_reflection_refuse_it_likewise(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """The health and reflection services refuse a malformed message as INVALID_ARGUMENT, without a traceback.

    Regression: malformed messages to health and reflection got UNKNOWN, and 2 kB of traceback in the log
    each.
    """
    async with serving() as (_, server), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for message in (b"\xff\xff\xff", b"\x0a\x80\x80\x40" + b"x" * (1 << 20)):
            call: Any = channel.stream_stream(f"/{method}", **RAW)(timeout=60)
            await call.write(message)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not tracebacks(caplog)


async def test_a_bomb_is_refused_before_it_goes_off() -> None:
    """A compressed message that unpacks to a huge one is refused before it is parsed.

    Regression: a packet of 10 KB, 5 million empty messages when unzipped, froze a target for 50 s and took 5
    GB.
    """
    bomb = b"\x4a\x00" * (512 * 1024)  # 1 MiB of empty submessages; far more is refused by gRPC itself
    async with serving() as (servicer, server), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        path = f"/{servicer.service_name}/Generate"
        began = time.monotonic()
        call: Any = channel.unary_stream(path, **RAW)(bomb, compression=grpc.Compression.Gzip, timeout=60)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert time.monotonic() - began < 20


async def test_a_peer_that_reads_nothing_is_dropped() -> None:
    """A stream that the peer does not read is ended after a time.

    Regression: a stream that was not read kept its slot for as long as the peer answered pings.
    """
    async with (
        serving() as (servicer, server),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=DEAF) as deaf,
        open_channel(f"127.0.0.1:{server.port}") as good,
    ):
        call = rpc.GenerationServiceStub(deaf).Generate(pb.GenerateRequest())
        async with asyncio.timeout(60):
            await servicer.ended.wait()
        assert servicer.num_streams == 0
        reading = rpc.GenerationServiceStub(good).Generate(pb.GenerateRequest())
        began = time.monotonic()
        while time.monotonic() - began < 4 * STALL_S:  # slow is not deaf
            assert len((await reading.read()).delta.text) == 10_000
            await asyncio.sleep(0.01)
        reading.cancel()
        call.cancel()


async def test_an_answer_that_is_not_read_is_dropped() -> None:
    """An answer that the client does not read is dropped after a time.

    Regression: unread answers, 256 of 4 MB each, stayed in memory as long as their client answered pings.
    """
    async with (
        serving() as (servicer, server),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=DEAF) as deaf,
        open_channel(f"127.0.0.1:{server.port}") as good,
    ):
        path = f"/{servicer.service_name}/Detokenize"
        call: Any = deaf.unary_stream(path, **RAW)(b"")
        async with asyncio.timeout(60):
            await servicer.ended.wait()
        answer = await rpc.GenerationServiceStub(good).Detokenize(pb.DetokenizeRequest(), timeout=60)
        assert len(answer.text) == 10_000
        call.cancel()


async def test_a_silent_health_watcher_delays_no_other() -> None:
    """A health watcher that does not read delays neither others nor the end of the server.

    Regression: one watcher that did not read made SIGTERM wait for ever, since grpcio writes to it under a
    lock.
    """
    async with serving() as (_, server):
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(address, options=DEAF) as deaf, open_channel(address) as good:
            stub: Any = health_pb2_grpc.HealthStub(deaf)
            deaf_watch = stub.Watch(health_pb2.HealthCheckRequest())
            await deaf_watch.initial_metadata()
            for _ in range(50):  # as often as it takes to fill whatever lies between
                server.report(ready=False)
                server.report(ready=True)
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await server.refuse_new()
                assert await status(good, READINESS) == NOT_SERVING
                assert await status(good, LIVENESS) == SERVING
            deaf_watch.cancel()


async def test_watchers_get_changes() -> None:
    async with serving() as (_, server), open_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="specdec.v1.GenerationService"))
        assert (await watch.read()).status == SERVING
        server.report(ready=False, alive=False)
        assert (await watch.read()).status == NOT_SERVING
        assert await status(channel, LIVENESS) == NOT_SERVING
        server.report(ready=True)
        assert (await watch.read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(channel, "nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch.cancel()


async def test_watchers_have_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a server refuses a client's `Watch` since it has too many watchers, the client gets its health by `Check`."""
    monkeypatch.setattr(health, "MAX_WATCHERS", 1)
    async with serving() as (_, server), open_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        assert await stub.Watch(health_pb2.HealthCheckRequest(), timeout=60).code() is RESOURCE_EXHAUSTED
        assert [serves async for serves in health.health_of(channel)] == [True]
        server.report(ready=False)
        assert [serves async for serves in health.health_of(channel)] == [False]
        watch.cancel()


async def status(channel: grpc.aio.Channel, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
    return int(answer.status)


@pytest.mark.parametrize(("max_length", "expected"), [(2048, MIN_REQUEST_BYTES), (10**6, 5 * 10**6 + 64 * 1024)])
def test_limits_follow_from_the_context(max_length: int, expected: int) -> None:
    assert max_request_bytes(max_length) == expected
