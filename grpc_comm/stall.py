"""How long a call may wait for a peer that does not read."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc

from grpc_comm.errors import Status, StatusError
from grpc_comm.interceptors import Context, Handler, HandlerInterceptor, kind_of


class StallInterceptor(HandlerInterceptor):
    """Ends calls whose peer has read nothing for so many seconds while there is something to read."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s

    def replaced(self, method: Any, name: str) -> Any:
        """See `MethodInterceptor`; a single answer goes out as a stream of one: gRPC itself would wait for ever."""
        if self.covers(name) and not method.response_streaming:
            kind = kind_of(method)
            handlers = {kind: None, f"{kind.partition('_')[0]}_stream": _answering(getattr(method, kind))}
            method = method._replace(response_streaming=True, **handlers)
        return super().replaced(method, name)

    def wrap(self, behavior: Handler, name: str) -> Handler:
        """See `HandlerInterceptor`."""

        async def impatient(request: Any, context: Context) -> Any:
            watched = _Impatient(context, self._stall_timeout_s)
            try:
                return await behavior(request, cast(Context, watched))
            finally:
                watched.stop_watching()

        return impatient


def _answering(behavior: Handler) -> Handler:
    """A handler that writes its answer, in the place of one that returns it."""

    async def answering(request: Any, context: Context) -> None:
        await context.write(await behavior(request, context))

    return answering


class _Impatient:
    """A context whose writes do not wait for ever.

    One timer looks after all writes of a call: one for each would cost a twentieth of a token's way.
    """

    def __init__(self, context: Context, stall_timeout_s: float) -> None:
        self._context = context
        self._stall_timeout_s = stall_timeout_s
        self._writer: asyncio.Task[Any] | None = None  # while it writes
        self._began = 0.0
        self._has_stalled = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(stall_timeout_s, self._look)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def stop_watching(self) -> None:
        """The call has ended."""
        self._timer.cancel()

    def _look(self) -> None:
        """End a write that has lasted too long, or look again when the present one would have."""
        ends = self._began + self._stall_timeout_s if self._writer else self._loop.time() + self._stall_timeout_s
        if self._writer is not None and self._loop.time() >= ends:
            self._has_stalled = True
            self._writer.cancel()
        else:
            self._timer = self._loop.call_at(ends, self._look)

    async def write(self, message: Any) -> None:
        """As the context's.

        Raises:
            StatusError: the peer does not read.
        """
        self._began, self._writer = self._loop.time(), asyncio.current_task()
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if not self._has_stalled:
                raise
            if self._writer is not None:
                self._writer.uncancel()
            text = f"the peer has read nothing for {self._stall_timeout_s:g} s"
            raise StatusError(Status(grpc.StatusCode.ABORTED, text)) from None
        finally:
            self._writer = None
