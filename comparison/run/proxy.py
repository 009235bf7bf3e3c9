"""A network on loopback: a TCP proxy that delays, slows down, cuts or silences what passes through it.

Pipelined: a delay postpones bytes without holding up those behind them, so that latency does not limit throughput.
Knows nothing of gRPC. An end that closes closes the other, after what is under way has arrived.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from grpc_comm.server import listener

MAX_PENDING_BYTES = 64 * 1024 * 1024
"""Under way per connection and direction; above it the sender is held back."""


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """What a link does to bytes.

    Attributes:
        rtt_s: round trip time in seconds, half of it in each direction.
        jitter_s: up to so many seconds more per direction, drawn for every chunk; the order is kept.
        bytes_per_s: bandwidth per direction, over all connections together; None is unlimited.
    """

    rtt_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None


class DelayProxy:
    """Passes everything on from one port of loopback to another; conditions may change at any time.

    Args:
        port: the one it accepts on.
        upstream: the one behind it.
    """

    def __init__(self, port: int, upstream: int, conditions: LinkConditions) -> None:
        self.port = port
        self.conditions = conditions
        self.ends: set[_End] = set()
        self.is_cut = self.is_silent = False
        self._upstream = upstream
        self._lanes = _Lane(self), _Lane(self)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def accept(self) -> asyncio.Protocol:
        """Both ends of a new connection; returns the one to the client, which opens the other."""
        to_server, to_client = self._lanes
        near, far = _NearEnd(self, to_server), _End(self, to_client)
        near.peer, far.peer = far, near
        return near

    async def connect(self, end: _End) -> None:
        """Open the way on to the server for a connection that was accepted."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: end, "127.0.0.1", self._upstream)
        except OSError:  # nobody listens: the client sees what it would see without us
            end.peer.abort()

    def cut(self) -> None:
        """Reset every connection, and new ones at once."""
        self.is_cut = True
        for end in tuple(self.ends):
            end.abort()

    def blackhole(self) -> None:
        """Deliver nothing more and say nothing, as a pulled cable does; `restore` delivers what has piled up."""
        self.is_silent = True

    def restore(self) -> None:
        """End `cut` and `blackhole`."""
        self.is_cut = self.is_silent = False
        for end in tuple(self.ends):
            end.flush()
            end.peer.flush()  # it may have closed meanwhile, and have last bytes to deliver


class _Lane:
    """One direction of the link, shared by its connections: decides when bytes arrive."""

    def __init__(self, proxy: DelayProxy) -> None:
        self._proxy = proxy
        self._free_at = 0.0
        self._random = random.Random(0)

    def arrival(self, num_bytes: int) -> float:
        """When bytes sent now arrive, in monotonic seconds."""
        conditions, now = self._proxy.conditions, time.monotonic()
        delay_s = conditions.rtt_s / 2 + self._random.uniform(0.0, conditions.jitter_s)
        if conditions.bytes_per_s is None:
            return now + delay_s
        self._free_at = max(now, self._free_at) + num_bytes / conditions.bytes_per_s
        return self._free_at + delay_s


class _End(asyncio.Protocol):
    """One end of a connection. What it receives leaves by its peer, when the lane says so."""

    peer: _End

    def __init__(self, proxy: DelayProxy, lane: _Lane) -> None:
        self._proxy = proxy
        self._lane = lane
        self._transport: asyncio.Transport | None = None
        self._pending: deque[tuple[float, bytes]] = deque()  # when it is due, and what; nothing: close
        self._num_pending_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._last_due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._proxy.ends.add(self)
        if self._proxy.is_cut:
            self.abort()
        self.peer.flush()  # what came while the connection was being made

    def data_received(self, data: bytes) -> None:
        self._num_pending_bytes += len(data)
        if self._num_pending_bytes > MAX_PENDING_BYTES:
            self.pause_reading()
        self._enqueue(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._proxy.ends.discard(self)
        self._enqueue(b"")

    def pause_writing(self) -> None:
        self.peer.pause_reading()

    def resume_writing(self) -> None:
        self.peer.resume_reading()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and self._num_pending_bytes <= MAX_PENDING_BYTES:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Reset this end; the other follows."""
        if self._transport is not None:
            self._transport.abort()

    def _enqueue(self, data: bytes) -> None:
        # Never before what was sent earlier, whatever the jitter.
        self._last_due = max(self._last_due, self._lane.arrival(len(data)))
        self._pending.append((self._last_due, data))
        self.flush()

    def flush(self) -> None:
        """Deliver what is due, and come back for the rest."""
        way = self.peer._transport
        if self._proxy.is_silent or way is None:
            return
        while self._pending and self._pending[0][0] <= time.monotonic():
            self._deliver(self._pending.popleft()[1], way)
        if self._timer is not None:
            self._timer.cancel()
        if self._pending:
            wait_s = self._pending[0][0] - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.flush)

    def _deliver(self, data: bytes, way: asyncio.Transport) -> None:
        if not data:
            way.close()
            return
        self._num_pending_bytes -= len(data)
        way.write(data)
        if self._num_pending_bytes + len(data) > MAX_PENDING_BYTES:
            self.resume_reading()


class _NearEnd(_End):
    """The accepted one; opens the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.create_task(self._proxy.connect(self.peer))


@asynccontextmanager
async def delay_proxy(port: int, conditions: LinkConditions = LinkConditions()) -> AsyncGenerator[DelayProxy, None]:
    """A proxy in front of a port of this host, on a free one, until the block is left."""
    listening = listener("127.0.0.1", 0)
    proxy = DelayProxy(listening.getsockname()[1], port, conditions)
    server = await asyncio.get_running_loop().create_server(proxy.accept, sock=listening)
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await asyncio.sleep(0)  # lets the transports close


def precise_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are good to a tenth of a millisecond: epoll (and uvloop) round up to a whole one."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
