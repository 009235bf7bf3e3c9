"""The health that a gRPC server reports, and clients that watch it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.grpc_comm import health
from specdec.grpc_comm import server as module
from specdec.grpc_comm.call import Call
from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.errors import Status, StatusError
from specdec.grpc_comm.health import HealthServicer, served
from specdec.grpc_comm.server import Server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def started() -> Server:
    server = Server("127.0.0.1:0", [], status_of=lambda _: None)
    await server.open()
    return server


async def until(stub: Any, status: int) -> None:
    """Wait until the server's health service reports this status."""
    async with asyncio.timeout(60):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == status:
                return


async def test_health_follows_the_server_behind() -> None:
    """A server whose upstream server is lost reports NOT_SERVING, whatever it reports of itself.

    Regression: a draft worker that had lost its target reported SERVING, and its gateway was healthy (status 200).
    """
    server = await started()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await until(stub, SERVING)
        server.report_upstream(False)
        server.report(ready=True)
        await until(stub, NOT_SERVING)
        server.report_upstream(True)
        await until(stub, SERVING)
        await server.refuse_new()
        server.report_upstream(True)
        await until(stub, NOT_SERVING)
    await server.close()


class Cut(HealthServicer):
    """Health service that ends each watch: at once, or after the first message if `status` is UNAVAILABLE."""

    status = grpc.StatusCode.UNAVAILABLE

    async def Watch(self, request: Any, call: Call) -> None:
        if self.status is grpc.StatusCode.UNAVAILABLE:
            await call.write(await self.Check(request, call))
            await asyncio.sleep(0.05)
        raise StatusError(Status(self.status, "the stream was idle for too long"))


async def test_a_watch_that_ends_before_its_connection_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client starts its health watch again if the watch ends while the connection stays.

    Regression: a proxy ended a client's health watch but kept the connection, so the client did not see when its server
    was shutting down.
    """
    monkeypatch.setattr(module, "HealthServicer", Cut)
    monkeypatch.setattr(health, "WATCH_AGAIN_S", 0.02)
    server = await started()
    async with open_channel(f"127.0.0.1:{server.port}") as channel, asyncio.timeout(60):
        news = served(channel)
        assert [await anext(news) for _ in range(3)] == [True] * 3
        server.report(ready=False)
        assert False in [await anext(news) for _ in range(3)]
        server.report(ready=True)
        while not await anext(news):
            pass
        monkeypatch.setattr(Cut, "status", grpc.StatusCode.UNAUTHENTICATED)
        while await anext(news):
            pass
        monkeypatch.setattr(Cut, "status", grpc.StatusCode.RESOURCE_EXHAUSTED)
        while not await anext(news):
            pass
        await news.aclose()
    await server.close()
