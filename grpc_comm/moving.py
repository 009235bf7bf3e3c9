"""Streams that a server which ends may hand to another: callers that could go on elsewhere say so in their metadata."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from grpc_comm.errors import Status, StatusError
from grpc_comm.interceptors import Context, Handler, HandlerInterceptor

CAN_MOVE = (("specdec-can-move", "1"),)
"""Metadata of a call whose caller has another server."""
MOVED = "the server is shutting down: go on at another one"


class MoveInterceptor(HandlerInterceptor):
    """Ends the calls that can move, once it is told to, behind what they have been sent; and leaves all others."""

    def __init__(self) -> None:
        self._timers: set[asyncio.Timeout] = set()
        self._moves = False

    def move(self) -> None:
        """From now on nobody stays who has somewhere to go."""
        self._moves = True
        for timer in self._timers:
            timer.reschedule(0.0)

    def wrap(self, behavior: Handler, name: str) -> Handler:
        """See `HandlerInterceptor`."""

        async def movable(request: Any, context: Context) -> Any:
            if not set(CAN_MOVE) <= {(key, value) for key, value in context.invocation_metadata() or ()}:
                return await behavior(request, context)
            timer = asyncio.timeout(0.0 if self._moves else None)
            self._timers.add(timer)
            try:
                async with timer:
                    return await behavior(request, context)
            except TimeoutError:
                if not timer.expired():
                    raise
                raise StatusError(Status(grpc.StatusCode.UNAVAILABLE, MOVED)) from None
            finally:
                self._timers.discard(timer)

        return movable
