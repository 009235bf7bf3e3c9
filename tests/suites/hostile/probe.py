"""The prober's process, which does nothing else: how long health checks take, in a JSON line now and then."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grpc_comm.channel import open_channel

PROBE_S = 0.05
TIMEOUT_S = 30.0
TELL_S = 0.2

Check = Callable[[], Awaitable[bool]]


class Prober:
    """Checks servers, and keeps the worst of each since it last told."""

    def __init__(self) -> None:
        self._worst: dict[str, float] = defaultdict(float)
        self._num_failed = 0

    async def watch(self, name: str, check: Check) -> None:
        """Probe a server for ever."""
        await check()  # makes the connection
        while True:
            began = time.monotonic()
            self._num_failed += not await check()
            self._take(name, time.monotonic() - began)
            began = time.monotonic()
            await asyncio.sleep(PROBE_S)
            self._take("this process", time.monotonic() - began - PROBE_S)

    def _take(self, name: str, seconds: float) -> None:
        self._worst[name] = max(self._worst[name], seconds)

    async def tell(self) -> None:
        """Print for ever."""
        while True:
            await asyncio.sleep(TELL_S)
            print(json.dumps({"worst": self._worst, "failed": self._num_failed}), flush=True)
            self._worst.clear()

    async def watch_grpc(self, name: str, address: str) -> None:
        """Check the liveness of a gRPC server for ever."""
        async with open_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)

            async def check() -> bool:
                request = health_pb2.HealthCheckRequest(service="liveness")
                try:
                    answer = await stub.Check(request, timeout=TIMEOUT_S)
                except grpc.aio.AioRpcError:
                    return False
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

            await self.watch(name, check)

    async def watch_http(self, name: str, url: str) -> None:
        """Check the liveness of an HTTP server for ever."""
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:

            async def check() -> bool:
                try:
                    return (await client.get("/livez")).status_code == 200
                except httpx.HTTPError:
                    return False

            await self.watch(name, check)


async def main(servers: dict[str, str]) -> None:
    """Probe servers, by name: URLs of HTTP servers, HOST:PORT of the others."""
    prober = Prober()
    ways = (prober.watch_http if "://" in where else prober.watch_grpc for where in servers.values())
    await asyncio.gather(prober.tell(), *(way(*server) for way, server in zip(ways, servers.items(), strict=True)))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
