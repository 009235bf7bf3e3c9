"""What a server says of its own health."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grpc_comm.channel import open_channel
from grpc_comm.health import served
from grpc_comm.server import Server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def started(port: int = 0, upstream: grpc.aio.Channel | None = None) -> Server:
    server = Server(f"127.0.0.1:{port}", [], status_of=lambda _: None)
    if upstream is not None:
        server.follow(served(upstream))
    await server.open()
    return server


async def until(stub: Any, status: int) -> None:
    """Wait until it is what the server says."""
    async with asyncio.timeout(20):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == status:
                return


async def test_health_follows_the_server_behind() -> None:
    """A draft worker without its target said SERVING, and a gateway in front of it 200, while nothing was served."""
    target = await started()
    async with open_channel(f"127.0.0.1:{target.port}") as upstream:
        worker = await started(upstream=upstream)
        async with open_channel(f"127.0.0.1:{worker.port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await until(stub, SERVING)
            await target.close()
            await until(stub, NOT_SERVING)
            target = await started(target.port)
            await until(stub, SERVING)
            await worker.refuse_new()
            await until(stub, NOT_SERVING)
            await worker.close()
    await target.close()
