"""gRPC's standard health service (grpc.health.v1): functions of clients, and the servicer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.grpc_comm.call import Call
from specdec.grpc_comm.errors import Status, StatusError, is_cancelled

TIMEOUT_S = 2.0
WATCH_AGAIN_S = 5.0
"""Seconds until the next watch, if one ends while its connection stays open."""
LIVENESS = "liveness"
"""Service name for the supervisor of the process: NOT_SERVING only if a restart would help."""
READINESS = "readiness"
"""Service name for clients and balancers; "" and the services' own names have the same status."""
MAX_WATCHERS = 256
"""Limit of watches; further clients are refused, and call Check instead. A full garbage collection stops the process
while it visits the objects of all watches: with 1024 of them a health check took 109 ms."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def is_serving(channel: grpc.aio.Channel) -> bool:
    """Return whether the server at the channel's other end answers, within `TIMEOUT_S`, that it is SERVING."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == SERVING)


async def health_of(channel: grpc.aio.Channel) -> AsyncGenerator[bool, None]:
    """Watch a server's health until the watch ends; yield whether the server is SERVING, at first and at each change.

    A server without a health service is SERVING; one that refuses the caller is not.
    """
    stub: Any = health_pb2_grpc.HealthStub(channel)
    call = stub.Watch(health_pb2.HealthCheckRequest())
    try:
        async for answer in call:
            yield bool(answer.status == SERVING)
    except grpc.aio.AioRpcError as exc:
        if exc.code() is grpc.StatusCode.UNIMPLEMENTED:  # no health service: healthy, as in gRPC's own clients
            yield True
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        elif exc.code() in _REFUSED:
            yield False
        elif exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # too many watches
            yield await is_serving(channel)
    except asyncio.CancelledError:
        if is_cancelled():
            raise
    finally:
        call.cancel()


async def served(channel: grpc.aio.Channel) -> AsyncGenerator[bool, None]:
    """Yield without end whether the server is SERVING: at each of its reports, and False when it cannot be reached.

    After each new connection the server reports again, even if its status is the same. A watch that ends while the
    connection stays open, by a proxy's timeout or a refusal, starts again after `WATCH_AGAIN_S`.
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
    """Servicer of grpc.health.v1.Health.

    grpcio's own servicer writes to each watcher under the lock that a change of status needs, so one watcher that did
    not read kept a server from draining. Here a slow watcher delays only itself, and gets the latest status.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._watchers: set[asyncio.Event] = set()

    def set(self, name: str, status: int) -> None:
        """Set the health status of the service called `name`, and return without waiting for the watchers.

        Args:
            status: `SERVING` or `NOT_SERVING`.
        """
        self._statuses[name] = status
        for changed in self._watchers:
            changed.set()

    async def Check(self, request: Any, call: Call) -> Any:
        """Return the present status of the service that the request names; NOT_FOUND if it has none."""
        status = self._statuses.get(request.service)
        if status is None:
            raise StatusError(Status(grpc.StatusCode.NOT_FOUND, "no service of this name has a health"))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, call: Call) -> None:
        """Write the present status and its changes.

        Raises:
            StatusError: RESOURCE_EXHAUSTED, since `MAX_WATCHERS` other clients watch already.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            text = f"{MAX_WATCHERS} others watch this server's health"
            raise StatusError(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, text, retry_after_s=60.0))
        changed, sent = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                status = self._statuses.get(request.service, _UNKNOWN)
                if status != sent:
                    await call.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                await changed.wait()
        finally:
            self._watchers.discard(changed)
