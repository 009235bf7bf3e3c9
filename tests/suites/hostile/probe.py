"""Process of the hostile suite that times health checks, and prints the longest ones as JSON lines at intervals.

From a check's time the waits for a CPU core are subtracted: those of the server's event loop, of another of its
threads, and of this process. On a busy machine they are most of the time, and no attack causes them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.grpc_comm.channel import open_channel
from tests.support import vitals

PROBE_S = 0.1
TIMEOUT_S = 30.0
TELL_S = 0.2

Check = Callable[[], Awaitable[bool]]


class Prober:
    """Times health checks of servers, and remembers the longest check of each since the last line that it printed."""

    def __init__(self) -> None:
        self._worst: dict[str, float] = defaultdict(float)
        self._num_failed = 0

    async def watch(self, name: str, pid: int, check: Check) -> None:
        """Check a server until cancelled; remember the seconds of its longest check, less waits for a CPU core.

        Args:
            name: name under which `tell` prints the longest check.
            pid: id of the server's process, whose waits for a core are subtracted.
            check: function that sends one check, and returns whether it succeeded; failed ones are counted.
        """
        await check()  # makes the connection
        while True:
            before, own, began = vitals.waited_s(pid), _own_wait_s(), time.monotonic()
            self._num_failed += not await check()
            took = time.monotonic() - began
            waited = waited_between(before, vitals.waited_s(pid), first=pid) + _own_wait_s() - own
            self._worst[name] = max(self._worst[name], took - waited)
            await asyncio.sleep(PROBE_S)

    async def tell(self) -> None:
        """Print each server's longest check and how many failed, as JSON, every TELL_S seconds, until cancelled."""
        while True:
            await asyncio.sleep(TELL_S)
            print(json.dumps({"worst": self._worst, "failed": self._num_failed}), flush=True)
            self._worst.clear()

    async def watch_grpc(self, name: str, address: str, pid: int) -> None:
        """Time checks of a gRPC server's health service ("liveness") until cancelled.

        `name` and `pid` (of the server's process) are as in `watch`.
        """
        async with open_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)

            async def check() -> bool:
                request = health_pb2.HealthCheckRequest(service="liveness")
                try:
                    answer = await stub.Check(request, timeout=TIMEOUT_S)
                except grpc.aio.AioRpcError:
                    return False
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

            await self.watch(name, pid, check)

    async def watch_http(self, name: str, url: str, pid: int) -> None:
        """Time requests of /livez of the HTTP server at `url` until cancelled.

        `name` is that under which `tell` prints the longest one. `pid` is the server's process, whose waits for a core
        do not count; a request that fails is counted as a failed check.
        """
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:

            async def check() -> bool:
                try:
                    return (await client.get("/livez")).status_code == 200
                except httpx.HTTPError:
                    return False

            await self.watch(name, pid, check)


def waited_between(before: dict[int, float], after: dict[int, float], *, first: int) -> float:
    """Return the seconds that a server waited for a core between two readings of its threads' waits.

    They are those of thread `first`, plus the most of any other thread. A thread that began meanwhile counts from its
    start; the waits of one that ended are unknown.
    """
    waits = {thread: wait - before.get(thread, 0.0) for thread, wait in after.items()}
    return waits.pop(first, 0.0) + max(waits.values(), default=0.0)


def _own_wait_s() -> float:
    return vitals.waited_s(os.getpid())[os.getpid()]


async def main(servers: dict[str, tuple[str, int]]) -> None:
    """Time the health checks of all servers; each name has a URL or HOST:PORT, and a process id."""
    prober = Prober()
    work = [
        (prober.watch_http if "://" in where else prober.watch_grpc)(name, where, pid)
        for name, (where, pid) in servers.items()
    ]
    await asyncio.gather(prober.tell(), *work)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
