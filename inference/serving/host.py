"""One life of a server, whatever it serves: open its fronts, wait for a signal, drain, close. The one drain there is.

Draining means, in this order: no front takes new requests any more; what runs gets its grace, and the rest fails with a
word; then the fronts close. Every role that serves lives so, also one that has no port of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from grpc_comm.server import end_at_once_on_signal, stop_signal

logger = logging.getLogger(__name__)


class Front(Protocol):
    """A port that requests come in by."""

    async def open(self) -> None:
        """Listen, and say that requests are welcome."""

    async def refuse_new(self) -> None:
        """Say that no more are; those that run go on."""

    async def close(self) -> None:
        """End what is left of them."""


class Work(Protocol):
    """What a host drains: an engine, or whatever else runs requests."""

    async def stop(self, *, grace_s: float) -> None:
        """Take nothing new, let what runs finish for `grace_s` seconds, fail the rest."""


class Host:
    """A process that serves.

    Args:
        work: is drained.
        fronts: in the order in which they open.
        grace_s: seconds that running requests get.
    """

    def __init__(self, work: Work, fronts: Sequence[Front] = (), *, grace_s: float) -> None:
        self._work = work
        self._fronts = fronts
        self._grace_s = grace_s

    async def run(self, until: Awaitable[None] | None = None) -> None:
        """Serve until a signal, or until something ends by which all work has ended.

        Raises:
            Exception: what `until` ended with.
        """
        async with AsyncExitStack() as stack:
            for front in self._fronts:
                await stack.enter_async_context(opened(front))
            await self._serve(until)
            for front in reversed(self._fronts):
                await front.refuse_new()
            await self._work.stop(grace_s=self._grace_s)
        logger.info("stopped")

    async def _serve(self, until: Awaitable[None] | None) -> None:
        signal = asyncio.create_task(stop_signal())
        end = asyncio.ensure_future(until if until is not None else asyncio.Event().wait())
        await asyncio.wait({signal, end}, return_when=asyncio.FIRST_COMPLETED)
        if signal.done():
            end.cancel()
            end_at_once_on_signal()
            name, grace_s = signal.result().name, self._grace_s
            logger.info("%s: running requests get %g s; a second signal ends at once", name, grace_s)
            return
        signal.cancel()
        end.result()


@asynccontextmanager
async def opened(front: Front) -> AsyncGenerator[None, None]:
    """A front that is open while the block runs."""
    await front.open()
    try:
        yield
    finally:
        await front.close()
