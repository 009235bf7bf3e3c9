"""Notices within moments that a server has died, and ends the work that counts on it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from inference.errors import SpecDecError, UnavailableError
from inference.serving.processes import ServerProcess

GRACE_S = 2.0
"""A request fails at once when its server dies; the process's end is known a moment later."""

T = TypeVar("T")


class ServerWatch:
    """Watches server processes while work is under way."""

    def __init__(self) -> None:
        self._died: asyncio.Future[ServerProcess] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, server: ServerProcess) -> None:
        """From now on, its end is a failure."""
        self._tasks.append(asyncio.create_task(self._wait(server), name=f"watch {server.name}"))

    async def _wait(self, server: ServerProcess) -> None:
        await server.process.wait()
        if not self._died.done():
            self._died.set_result(server)

    def stop(self) -> None:
        """From now on, servers may end."""
        for task in self._tasks:
            task.cancel()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work as long as every server lives.

        Raises:
            UnavailableError: a server died; the message names it. The work has been cancelled.
        """
        task = asyncio.create_task(work)
        try:
            both: set[asyncio.Future[Any]] = {task, self._died}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), SpecDecError):
                await asyncio.wait({self._died}, timeout=GRACE_S)
            if self._died.done():
                raise _failure(self._died.result())
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def all_or_none(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first failure cancels the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failure(server: ServerProcess) -> UnavailableError:
    log = server.log_tail()
    words = f"; its last words:\n{log}" if log else ""
    return UnavailableError(f"the {server.name} server {_end_of(server)} during the comparison{words}")


def _end_of(server: ServerProcess) -> str:
    code = server.process.returncode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
