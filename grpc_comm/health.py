"""The standard health service: asking a server whether it serves, and answering."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grpc_comm.call import Call
from grpc_comm.errors import Status, StatusError, is_cancelled

TIMEOUT_S = 2.0
WATCH_AGAIN_S = 5.0
"""After a watch has ended whose connection holds."""
LIVENESS = "liveness"
"""Service name for whoever restarts the process: NOT_SERVING only when a restart is what helps."""
READINESS = "readiness"
"""Service name for whoever sends requests, as are "" and the services' own names."""
MAX_WATCHERS = 256
"""What each keeps alive, every full garbage collection looks at while nobody is served: with 1024 of them a check took
109 ms. Who finds no place asks."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def is_serving(channel: grpc.aio.Channel) -> bool:
    """Whether the server at the channel's other end answers, within `TIMEOUT_S`, that it is SERVING."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == SERVING)


async def health_of(channel: grpc.aio.Channel) -> AsyncGenerator[bool, None]:
    """Whether the server at the other end serves, whenever that changes; until the call ends."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    call = stub.Watch(health_pb2.HealthCheckRequest())
    try:
        async for answer in call:
            yield bool(answer.status == SERVING)
    except grpc.aio.AioRpcError as exc:
        if exc.code() is grpc.StatusCode.UNIMPLEMENTED:  # a server without health is well, as gRPC's own clients see it
            yield True
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        elif exc.code() in _REFUSED:
            yield False
        elif exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # others watch it, as many as may: it can be asked
            yield await is_serving(channel)
    except asyncio.CancelledError:
        if is_cancelled():
            raise
    finally:
        call.cancel()


async def served(channel: grpc.aio.Channel) -> AsyncGenerator[bool, None]:
    """Whether the server at the other end serves, now and whenever it says so anew: not without a connection; for ever.

    A server that takes another's place says so too, whatever that one said last. A watch that ends before its
    connection, by the patience of a proxy or as a stranger's, begins anew.
    """
    while True:
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            yield False
        is_ready = state is grpc.ChannelConnectivity.READY
        if is_ready:
            async with aclosing(health_of(channel)) as answers:
                async for serves in answers:
                    yield serves
        with suppress(TimeoutError):
            async with asyncio.timeout(WATCH_AGAIN_S if is_ready else None):
                await channel.wait_for_state_change(state)


class HealthServicer(health_pb2_grpc.HealthServicer):
    """grpc.health.v1.Health.

    Not the library's, which writes to each watcher under the lock that a change of health needs: one watcher that does
    not read kept a server from ever draining. Here a watcher waits for itself alone, and is told the latest status.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._watchers: set[asyncio.Event] = set()

    def set(self, name: str, status: int) -> None:
        """Say what the service of this name is; never waits."""
        self._statuses[name] = status
        for changed in self._watchers:
            changed.set()

    async def Check(self, request: Any, call: Call) -> Any:
        """Return the present status."""
        status = self._statuses.get(request.service)
        if status is None:
            raise StatusError(Status(grpc.StatusCode.NOT_FOUND, "no service of this name has a health"))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, call: Call) -> None:
        """Write the present status and, until the client leaves, every other one."""
        if len(self._watchers) >= MAX_WATCHERS:
            text = f"{MAX_WATCHERS} others watch this server's health"
            raise StatusError(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
        changed, told = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                status = self._statuses.get(request.service, _UNKNOWN)
                if status != told:
                    await call.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                await changed.wait()
        finally:
            self._watchers.discard(changed)
