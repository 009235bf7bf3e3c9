"""Exceptions of gRPC handlers become statuses; an unexpected one is logged once, and clients do not get its text."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import Any

import grpc
import pytest

from specdec.grpc_comm.call import Call
from specdec.grpc_comm.channel import UnreachableError, open_channel, wait_until_ready
from specdec.grpc_comm.errors import Status, status_of
from specdec.grpc_comm.server import PortTakenError, Server
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.config import address


class FailingServicer(rpc.GenerationServiceServicer):  # type: ignore[misc]
    service_name = "specdec.v1.GenerationService"
    max_request_bytes = 1000

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_GenerationServiceServicer_to_server(self, server)

    async def GetModel(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        raise ValueError("secret of the inside")

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:
        await call.write(pb.GenerateResponse(started=pb.Started()))
        raise KeyError("full")


def status_of_ours(error: Exception) -> Status | None:
    if isinstance(error, KeyError):
        return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "all taken", 1.25)
    return None


def new_server(where: str) -> Server:
    return Server(where, [FailingServicer()], status_of=status_of_ours)


@asynccontextmanager
async def serving() -> AsyncGenerator[tuple[Server, Any], None]:
    server = new_server("127.0.0.1:0")
    await server.open()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield server, rpc.GenerationServiceStub(channel)
    await server.close()


async def test_unexpected_failures_are_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(pb.GetModelRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert [record.exc_info is not None for record in caplog.records if record.name == "specdec.grpc_comm.guard"] == [
        True
    ]


async def test_expected_failures_carry_their_hint(caplog: pytest.LogCaptureFixture) -> None:
    """An expected error during a stream gives a status with the time after which to try again, and no log line."""
    async with serving() as (_, stub):
        call = stub.Generate(pb.GenerateRequest(), timeout=60)
        assert (await call.read()).WhichOneof("event") == "started"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert status_of(caught.value) == Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "all taken", 1.25)
    assert [record for record in caplog.records if record.name == "specdec.grpc_comm.guard"] == []


@pytest.mark.parametrize(("name", "words"), [("Assist", "UNIMPLEMENTED"), ("Verify", "draft_session")])
async def test_methods_that_are_not_there(name: str, words: str) -> None:
    """Calling a method that does not exist gives UNIMPLEMENTED; for a former method the error names its replacement."""
    async with serving() as (server, _), open_channel(f"127.0.0.1:{server.port}") as channel:
        call: Any = channel.stream_stream(f"/specdec.v1.VerificationService/{name}")(timeout=60)
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_is_taken_once() -> None:
    async with serving() as (server, _):
        with pytest.raises(PortTakenError, match=f"127.0.0.1:{server.port}"):
            new_server(f"127.0.0.1:{server.port}")


async def test_waiting_for_an_absent_server_ends() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1 within 0\.2 s"):
            await wait_until_ready(channel, "127.0.0.1:1", timeout_s=0.2)


@pytest.mark.parametrize(
    ("host", "expected"), [("localhost", "localhost:5"), ("10.0.0.1", "10.0.0.1:5"), ("::1", "[::1]:5")]
)
def test_an_address_of_ipv6_has_brackets(host: str, expected: str) -> None:
    assert address(host, 5) == expected


def test_status_without_a_hint_needs_no_details() -> None:
    assert Status(grpc.StatusCode.UNAVAILABLE, "gone").trailing_metadata() == ()


async def failed(call: Any) -> None:
    """Read a call to its end, and ignore its error."""
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass


async def test_failed_calls_leave_no_frames_for_the_collector() -> None:
    """Failed calls leave no reference cycles for the garbage collector.

    Regression: refused messages left reference cycles; freeing 84,000 at a time stopped all requests for 170
    ms.
    """
    async with serving() as (_, stub):
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await failed(stub.Generate(pb.GenerateRequest(), timeout=60))
            async with asyncio.timeout(60):
                while frames_of("Generate", "guard", "_abort"):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        finally:
            gc.enable()


def frames_of(*names: str) -> list[FrameType]:
    """Return the stack frames of functions with these names that the garbage collector tracks, also those in cycles."""
    return [each for each in gc.get_objects() if type(each) is FrameType and each.f_code.co_name in names]
