"""A completer that can be drained: for a process whose requests live in other servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from inference.commit import Event
from inference.errors import UnavailableError
from inference.workers.completion import Completer, CompletionRequest


class DrainingCompleter:
    """Passes everything on until its grace is over; then every request fails with UnavailableError."""

    fault = broken = None
    hangs = False

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._timers: set[asyncio.Timeout] = set()
        self._num_open = 0
        self._left = asyncio.Event()
        self._ended = False

    async def stop(self, *, grace_s: float) -> None:
        """Let requests finish for `grace_s` seconds, then fail what still runs."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._num_open:
                    self._left.clear()
                    await self._left.wait()
                return
        self._ended = True
        for timer in self._timers:
            timer.reschedule(0.0)

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`."""
        self._num_open += 1
        try:
            async with aclosing(self._completer.complete(request)) as events:
                while (event := await self._next(events)) is not None:
                    yield event
        finally:
            self._num_open -= 1
            self._left.set()

    async def _next(self, events: AsyncGenerator[Event, None]) -> Event | None:
        if self._ended:
            raise UnavailableError("the server is shutting down")
        timer = asyncio.timeout(None)
        try:
            async with timer:
                self._timers.add(timer)
                return await anext(events, None)
        except TimeoutError:
            raise UnavailableError("the server is shutting down") from None
        finally:
            self._timers.discard(timer)
