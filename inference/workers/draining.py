"""A completer that can be drained: for a process whose requests live in other servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Self, TypeVar

from inference.commit import Event
from inference.errors import UnavailableError
from inference.workers.completion import Completer, CompletionRequest

SHUTTING_DOWN = "the server is shutting down"
T = TypeVar("T")


class Wait:
    """Waits for one item after another, until an end that is the same for all: a timer each would cost 3 us.

    Used as a context manager; behaves like `asyncio.timeout` around each item, and not around what is done with them.

    Args:
        deadline: by the event loop's clock; None: until `end`.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._waiting: asyncio.Task[object] | None = None
        self._is_over = False
        loop = asyncio.get_running_loop()
        self._timer = None if deadline is None else loop.call_at(deadline, self.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def end(self) -> None:
        """Wait no longer, neither now nor for later items."""
        if self._waiting is not None and not self._is_over:
            self._waiting.cancel()
        self._is_over = True

    async def next(self, items: AsyncGenerator[T, None]) -> T | None:
        """The next item; None behind the last one.

        Raises:
            TimeoutError: the end came first.
        """
        if self._is_over:
            raise TimeoutError
        task = self._waiting = asyncio.current_task()
        num_cancels = 0 if task is None else task.cancelling()
        try:
            return await anext(items, None)
        except asyncio.CancelledError as exc:
            if not self._is_over or task is None or task.cancelling() > num_cancels + 1:
                raise  # it was, or was also, somebody else
            raise TimeoutError from exc
        finally:
            self._waiting = None
            if self._is_over and task is not None:
                task.uncancel()


class DrainingCompleter:
    """Passes everything on until its grace is over; then every request fails with UnavailableError."""

    fault = broken = None
    hangs = False

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._waits: set[Wait] = set()  # of the requests that are open
        self._left = asyncio.Event()
        self._ended = False

    async def stop(self, *, grace_s: float) -> None:
        """Let requests finish for `grace_s` seconds, then fail what still runs."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._waits:
                    self._left.clear()
                    await self._left.wait()
                return
        self._ended = True
        for wait in self._waits:
            wait.end()

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`."""
        if self._ended:
            raise UnavailableError(SHUTTING_DOWN)
        self._waits.add(wait := Wait())
        try:
            async with aclosing(self._completer.complete(request)) as events:
                while (event := await wait.next(events)) is not None:
                    yield event
        except TimeoutError:
            raise UnavailableError(SHUTTING_DOWN) from None
        finally:
            self._waits.discard(wait)
            self._left.set()
