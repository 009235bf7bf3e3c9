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
    """Accepts on a free port of loopback and passes everything on to another; conditions may change at any time."""

    def __init__(self, port: int, conditions: LinkConditions = LinkConditions()) -> None:
        self.conditions = conditions
        self._upstream = port
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()
        self._is_cut = False
        self.is_silent = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        to_server, to_client = _Lane(self), _Lane(self)
        self._server = await loop.create_server(lambda: _ClientEnd(self, to_server, to_client), "127.0.0.1", 0)

    @property
    def port(self) -> int:
        """The port it accepts on, once started."""
        if self._server is None:
            raise RuntimeError("the proxy has not been started")
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def connect(self, end: _End) -> None:
        """Open the way on to the server for a connection that was accepted."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: end, "127.0.0.1", self._upstream)
        except OSError:  # nobody listens: the client sees what it would see without us
            end.peer.abort()

    def register(self, end: _End) -> bool:
        """Take in a new connection; False while the link is cut."""
        if not self._is_cut:
            self._ends.add(end)
        return not self._is_cut

    def unregister(self, end: _End) -> None:
        self._ends.discard(end)

    def cut(self) -> None:
        """Reset every connection, and new ones at once."""
        self._is_cut = True
        for end in tuple(self._ends):
            end.abort()

    def blackhole(self) -> None:
        """Deliver nothing more and say nothing, as a pulled cable does; `restore` delivers what has piled up."""
        self.is_silent = True

    def restore(self) -> None:
        """End `cut` and `blackhole`."""
        self._is_cut = self.is_silent = False
        for end in tuple(self._ends):
            end.flush()
            end.peer.flush()  # it may have closed meanwhile, and have last bytes to deliver

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for end in tuple(self._ends):
            end.abort()
        await asyncio.sleep(0)  # lets the transports close


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
        self._pending: deque[tuple[float, bytes | None]] = deque()  # None: close
        self._num_pending_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._last_due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._proxy.register(self):
            self.abort()

    def data_received(self, data: bytes) -> None:
        self._num_pending_bytes += len(data)
        if self._num_pending_bytes > MAX_PENDING_BYTES:
            self.pause_reading()
        self._enqueue(data, len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._proxy.unregister(self)
        self._enqueue(None, 0)

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

    def _enqueue(self, data: bytes | None, num_bytes: int) -> None:
        # Never before what was sent earlier, whatever the jitter.
        self._last_due = max(self._last_due, self._lane.arrival(num_bytes))
        self._pending.append((self._last_due, data))
        self.flush()

    def flush(self) -> None:
        """Deliver what is due, and come back for the rest."""
        if self._proxy.is_silent or not self.peer.is_open:
            return
        while self._pending and self._pending[0][0] <= time.monotonic():
            self._deliver(self._pending.popleft()[1])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending:
            wait_s = self._pending[0][0] - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.flush)

    def _deliver(self, data: bytes | None) -> None:
        if data is None:
            self.peer.close()
            return
        self._num_pending_bytes -= len(data)
        self.peer.write(data)
        if self._num_pending_bytes + len(data) > MAX_PENDING_BYTES:
            self.resume_reading()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _ClientEnd(_End):
    """The accepted side; opens the other one."""

    def __init__(self, proxy: DelayProxy, to_server: _Lane, to_client: _Lane) -> None:
        super().__init__(proxy, to_server)
        self.peer = _ServerEnd(proxy, to_client, self)
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.is_open:
            self._connecting = asyncio.create_task(self._proxy.connect(self.peer))


class _ServerEnd(_End):
    """The side towards the server."""

    def __init__(self, proxy: DelayProxy, lane: _Lane, peer: _End) -> None:
        super().__init__(proxy, lane)
        self.peer = peer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer.flush()  # what came while the connection was being made


@asynccontextmanager
async def delay_proxy(port: int, conditions: LinkConditions = LinkConditions()) -> AsyncGenerator[DelayProxy, None]:
    """A proxy in front of a port of this host until the block is left."""
    proxy = DelayProxy(port, conditions)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


def precise_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are good to a tenth of a millisecond: epoll (and uvloop) round up to a whole one."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
