"""A gRPC call as its handler sees it, and limits of time for parts of calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc

from specdec.grpc_comm.errors import Status, StatusError

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""gRPC's side of a call, whose messages may be of any type."""
CAN_MOVE = (("specdec-can-move", "1"),)
"""Metadata by which a client says that it can continue the call's request at another server."""


def peer_of(context: Context) -> str:
    """Return the address of a call's peer as HOST:PORT, or "-" if it is unknown; gRPC has `ipv6:%5B::1%5D:50051`."""
    return unquote(context.peer()).partition(":")[2] or "-"


class Call:
    """One gRPC call at a server: reads the peer's messages and writes the answers.

    One timer limits all writes of a call: a timer for each write would add 5 % to the cost of a token.

    Args:
        context: gRPC's object of the call.
        first: the peer's first message, which `Guard` has read from gRPC already; the first `read` returns it.
        stall_timeout_s: seconds that a write may wait for a peer that reads nothing.
    """

    def __init__(self, context: Context, first: Any, stall_timeout_s: float) -> None:
        self._context = context
        self._first = first
        self._stall_timeout_s = stall_timeout_s
        self._writer: asyncio.Task[Any] | None = None  # while it writes
        self._began = 0.0
        self._has_stalled = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(stall_timeout_s, self._look)

    @property
    def deadline(self) -> float | None:
        """Return the time of the event loop's clock at which the call must end; None without a limit."""
        left_s = self._context.time_remaining()
        return None if left_s is None else self._loop.time() + left_s

    @property
    def peer(self) -> str:
        """Return the peer's address, which no two connections share while both are open."""
        return peer_of(self._context)

    async def read(self) -> Any:
        """Return the next message of the peer, or `grpc.aio.EOF` after the last."""
        first, self._first = self._first, None
        return await self._context.read() if first is None else first

    async def messages(self) -> AsyncGenerator[Any, None]:
        """Yield all messages of the peer."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def write(self, message: Any) -> None:
        """Send a message; return when gRPC has taken it.

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

    def _look(self) -> None:
        """Cancel the write in progress if it has waited too long; otherwise run again when it could have."""
        ends = (self._began if self._writer else self._loop.time()) + self._stall_timeout_s
        if self._writer is not None and self._loop.time() >= ends:
            self._has_stalled = True
            self._writer.cancel()
        else:
            self._timer = self._loop.call_at(ends, self._look)

    def close(self) -> None:
        """Stop the timer of a call that has ended."""
        self._timer.cancel()


class Limit:
    """Time limit of an `async with` block, which raises StatusError after some seconds, or when a task calls `end`.

    Args:
        status: the error's status after `timeout_s` seconds.
        timeout_s: seconds that the block may take; None: it ends early only by `end`.
        among: the limits whose blocks run now, oldest first; this limit is among them while its own block runs.
    """

    def __init__(self, status: Status, timeout_s: float | None, among: dict[Limit, None]) -> None:
        self._status = status
        self._timer = asyncio.timeout(timeout_s)
        self._among = among

    def end(self, status: Status) -> None:
        """End the block with `status`, unless it has already timed out."""
        self._among.pop(self, None)
        if not self._timer.expired():
            self._status = status
            self._timer.reschedule(0.0)

    async def __aenter__(self) -> None:
        await self._timer.__aenter__()
        self._among[self] = None

    async def __aexit__(self, *exception: Any) -> None:
        self._among.pop(self, None)
        try:
            await self._timer.__aexit__(*exception)
        except TimeoutError:
            raise StatusError(self._status) from None
