"""Simulated network on loopback: a TCP proxy that delays, slows down, cuts or silences its connections.

Delays are pipelined: they postpone bytes without holding up later ones, so that latency does not limit throughput. The
proxy knows nothing of gRPC. If one end closes, the other closes after the pending bytes have arrived.
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

from specdec.grpc_comm.server import listener

MAX_PENDING_BYTES = 64 * 1024 * 1024
"""Pending bytes per connection and direction above which the sender is held back."""


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """Delay and bandwidth of a link.

    Attributes:
        rtt_s: round trip time in seconds, half of it in each direction.
        jitter_s: maximum of a further delay in seconds per direction, drawn for every chunk; the order is kept.
        bytes_per_s: bandwidth per direction, over all connections together; None is unlimited.
    """

    rtt_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None


class DelayProxy:
    """Proxy from one port of loopback to another, over a link with delay and bandwidth as in `conditions`.

    Args:
        port: port on which the proxy accepts.
        upstream: port of the upstream server.
        conditions: conditions of the link; the attribute may be replaced at any time.
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
        """Return a new connection's end towards the client; it connects the end towards the server when it opens."""
        to_server, to_client = self._lanes
        near, far = _NearEnd(self, to_server), _End(self, to_client)
        near.peer, far.peer = far, near
        return near

    async def connect(self, end: _End) -> None:
        """Connect the end of a proxied connection that is towards the server; reset the client if no server listens."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: end, "127.0.0.1", self._upstream)
        except OSError:  # no server listens: the client sees the same as without a proxy
            end.peer.abort()

    def cut(self) -> None:
        """Reset every connection, and every later one as soon as it opens, until `restore` is called."""
        self.is_cut = True
        for end in tuple(self.ends):
            end.abort()

    def blackhole(self) -> None:
        """Deliver nothing more, and report no error, as with a pulled cable; `restore` delivers the pending bytes."""
        self.is_silent = True

    def restore(self) -> None:
        """End the effects of `cut` and `blackhole`, and deliver pending bytes that are due."""
        self.is_cut = self.is_silent = False
        for end in tuple(self.ends):
            end.flush()
            end.peer.flush()  # the peer may have closed meanwhile, with bytes still to deliver


class _Lane:
    """One direction of the emulated link, which computes the arrival times of the bytes of all connections."""

    def __init__(self, proxy: DelayProxy) -> None:
        self._proxy = proxy
        self._free_at = 0.0
        self._random = random.Random(0)

    def arrival(self, num_bytes: int) -> float:
        """Return the arrival time of bytes sent now, in monotonic seconds."""
        conditions, now = self._proxy.conditions, time.monotonic()
        delay_s = conditions.rtt_s / 2 + self._random.uniform(0.0, conditions.jitter_s)
        if conditions.bytes_per_s is None:
            return now + delay_s
        self._free_at = max(now, self._free_at) + num_bytes / conditions.bytes_per_s
        return self._free_at + delay_s


class _End(asyncio.Protocol):
    """One end of a proxied connection.

    Bytes that it receives leave by the other end (`peer`), at the time that the emulated link (`lane`) computes.
    """

    peer: _End

    def __init__(self, proxy: DelayProxy, lane: _Lane) -> None:
        self._proxy = proxy
        self._lane = lane
        self._transport: asyncio.Transport | None = None
        self._pending: deque[tuple[float, bytes]] = deque()  # time due, and bytes; empty bytes close
        self._num_pending_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._last_due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._proxy.ends.add(self)
        if self._proxy.is_cut:
            self.abort()
        self.peer.flush()  # bytes that came before the connection was open

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
        """Reset this end's connection; the other end closes too."""
        if self._transport is not None:
            self._transport.abort()

    def _enqueue(self, data: bytes) -> None:
        # Jitter never reorders bytes.
        self._last_due = max(self._last_due, self._lane.arrival(len(data)))
        self._pending.append((self._last_due, data))
        self.flush()

    def flush(self) -> None:
        """Deliver the bytes that are due to the other end, and schedule the next delivery."""
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
    """End of a proxied connection towards the client. When it has opened, it connects the end towards the server."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.create_task(self._proxy.connect(self.peer))


@asynccontextmanager
async def delay_proxy(port: int, conditions: LinkConditions = LinkConditions()) -> AsyncGenerator[DelayProxy, None]:
    """Yield a proxy, on a free port, to the port `port` of this host, until the block is left."""
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
    """Return an event loop with timers exact to 0.1 ms; epoll and uvloop round them up to a whole millisecond."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
