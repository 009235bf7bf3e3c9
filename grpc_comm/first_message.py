"""The first message of a call: how long it may take to come, and how many calls may wait for theirs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc

from grpc_comm.errors import Status, StatusError
from grpc_comm.interceptors import Context, Handler, MethodInterceptor, kind_of

FIRST_MESSAGE_S = 30.0
"""Half a megabyte takes a slow link a while; otherwise it comes with the call."""
MAX_WAITING = 256


class FirstMessageInterceptor(MethodInterceptor):
    """Ends calls whose first message does not come, of all services.

    gRPC waits for it for ever, in any number of calls, and each keeps some 20 KB and a hundred objects that every
    garbage collection looks at while nobody is served. Here it waits for `FIRST_MESSAGE_S`, in `MAX_WAITING` calls: one
    more ends the one that has waited longest, which is a stranger's and not that of whoever came last.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Timeout, None] = {}  # in the order in which they came

    def replaced(self, method: Any, name: str) -> Any:
        """See `MethodInterceptor`; a single request is read as a stream of one: gRPC itself would read it unwatched."""
        kind = kind_of(method)
        behavior = _writing(getattr(method, kind))
        if method.request_streaming:
            return method._replace(**{kind: self._streaming(behavior)})
        handlers = {kind: None, f"stream_{kind.partition('_')[2]}": self._single(behavior)}
        return method._replace(request_streaming=True, **handlers)

    def _single(self, behavior: Handler) -> Handler:
        async def single(_: object, context: Context) -> Any:
            request = await self._first(context)
            if request is grpc.aio.EOF:
                raise StatusError(Status(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a request"))
            return await behavior(request, context)

        return single

    def _streaming(self, behavior: Handler) -> Handler:
        async def streaming(_: object, context: Context) -> Any:
            begun = cast(Context, _Begun(context, await self._first(context)))
            return await behavior(_messages(begun), begun)

        return streaming

    async def _first(self, context: Context) -> Any:
        patience = asyncio.timeout(FIRST_MESSAGE_S)
        try:
            async with patience:
                self._make_room()
                self._waiting[patience] = None
                return await context.read()
        except TimeoutError:
            raise StatusError(self._why(patience)) from None
        finally:
            self._waiting.pop(patience, None)

    def _make_room(self) -> None:
        if len(self._waiting) < MAX_WAITING:
            return
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        if not oldest.expired():
            oldest.reschedule(0.0)

    def _why(self, patience: asyncio.Timeout) -> Status:
        if patience in self._waiting:
            text = f"no first message came for {FIRST_MESSAGE_S:g} s"
            return Status(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        text = f"{MAX_WAITING} later calls wait for their first message too"
        return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, text)


class _Begun:
    """A context whose first message has been read, and is read again by the handler."""

    def __init__(self, context: Context, first: Any) -> None:
        self._context = context
        self._first = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """As the context's."""
        first, self._first = self._first, None
        return await self._context.read() if first is None else first


async def _messages(context: Context) -> AsyncGenerator[Any, None]:
    while (message := await context.read()) is not grpc.aio.EOF:
        yield message


def _writing(behavior: Handler) -> Handler:
    """A handler that yields its responses, as reflection's does, as one that writes them."""
    if not inspect.isasyncgenfunction(behavior):
        return behavior

    async def each(request: Any, context: Context) -> None:
        async for response in behavior(request, context):
            await context.write(response)

    return each
