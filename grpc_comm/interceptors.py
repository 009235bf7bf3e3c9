"""What a handler is given besides its request."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from grpc_comm.errors import Status

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""Its messages are typed where they are converted; here they are anything."""

logger = logging.getLogger(__name__)

StatusOf = Callable[[Exception], Status | None]
Handler = Callable[[Any, Context], Awaitable[Any]]


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of our services: coroutines that write their responses themselves."""

    def wrap(self, behavior: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Return a handler that does something around `behavior`."""
        raise NotImplementedError

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None and not handler_call_details.method.startswith("/grpc."):
                handler = handler._replace(**{kind: self.wrap(behavior, handler_call_details)})
        return handler


class ErrorInterceptor(HandlerInterceptor):
    """Aborts a failed call with the status that `status_of` gives its exception, and with INTERNAL if it gives none."""

    def __init__(self, status_of: StatusOf) -> None:
        self._status_of = status_of

    def wrap(self, behavior: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """See `HandlerInterceptor`."""

        async def guarded(request: Any, context: Context) -> Any:
            try:
                return await behavior(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as exc:
                await self._abort(context, exc)

        return guarded

    async def _abort(self, context: Context, exc: Exception) -> None:
        status = self._status_of(exc)
        if status is None:
            logger.error("a call failed unexpectedly", exc_info=exc)
            status = Status(grpc.StatusCode.INTERNAL, "unexpected failure; the server's log has the cause")
        await context.abort(status.code, status.message, status.trailing_metadata())
