"""A completer whose requests can be ended at once, with a word to the client: for the end of a gateway's grace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from inference.commit import Event
from inference.errors import UnavailableError
from inference.workers.completion import Completer, CompletionRequest


class DrainingCompleter:
    """Passes everything on until `end`; then every request fails with UnavailableError."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._timers: set[asyncio.Timeout] = set()
        self._ended = False

    def end(self) -> None:
        """Fail what runs."""
        self._ended = True
        for timer in self._timers:
            timer.reschedule(0.0)

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`."""
        async with aclosing(self._completer.complete(request)) as events:
            while True:
                if self._ended:
                    raise UnavailableError("the server is shutting down")
                timer = asyncio.timeout(None)
                try:
                    async with timer:
                        self._timers.add(timer)
                        event = await anext(events, None)
                except TimeoutError:
                    continue
                finally:
                    self._timers.discard(timer)
                if event is None:
                    return
                yield event
