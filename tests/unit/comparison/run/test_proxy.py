"""The proxy that imitates a network; tests check only the shortest delays, since a busy machine makes them longer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from specdec.comparison.run.proxy import DelayProxy, LinkConditions, delay_proxy

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def _link(conditions: LinkConditions) -> AsyncGenerator[DelayProxy, None]:
    """Run a proxy in front of an echo server."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    try:
        async with delay_proxy(server.sockets[0].getsockname()[1], conditions) as proxy:
            yield proxy
    finally:
        server.close()


@asynccontextmanager
async def _connection(proxy: DelayProxy, *, is_warm: bool = True) -> AsyncGenerator[_Streams, None]:
    """Connect through a proxy; unless `is_warm` is False, first send one byte and read its echo."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        if is_warm:
            writer.write(b"!")
            await reader.readexactly(1)
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("conditions", "num_bytes", "least_s"),
    [
        (LinkConditions(rtt_s=0.1), (4,), 0.099),
        (LinkConditions(bytes_per_s=100_000), (20_000,), 0.199),
        (LinkConditions(bytes_per_s=100_000), (10_000, 10_000), 0.199),  # the bandwidth is shared
        (LinkConditions(rtt_s=0.02), (2 * 1024 * 1024,), 0.019),
    ],
)
async def test_conditions_delay_bytes(conditions: LinkConditions, num_bytes: tuple[int, ...], least_s: float) -> None:
    """Bytes arrive in order, and not before the network's delay and bandwidth allow it, on open connections too.

    Each of `num_bytes` is sent on a connection of its own, all at once; all have come after `least_s` or more.
    """
    async with _link(LinkConditions()) as proxy, AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(_connection(proxy)) for _ in num_bytes]
        proxy.conditions = conditions
        started, sent = time.monotonic(), [(bytes(range(256)) * 8192)[:count] for count in num_bytes]
        for (_, writer), data in zip(streams, sent, strict=True):
            writer.write(data)
        received = [reader.readexactly(len(data)) for (reader, _), data in zip(streams, sent, strict=True)]
        assert await asyncio.gather(*received) == sent
        assert time.monotonic() - started >= least_s


async def test_the_proxy_sends_small_writes_at_once() -> None:
    """The proxy sends small messages at once, to the client and to the server.

    Regression: sockets made without naming TCP kept Nagle's algorithm on, so each link added 40 ms to the time to first
    token.
    """
    async with _link(LinkConditions()) as proxy, _connection(proxy):
        sockets = [end._transport.get_extra_info("socket") for end in proxy.ends if end._transport is not None]
        assert [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0 for each in sockets] == [True, True]


async def test_delay_does_not_limit_throughput() -> None:
    """A delay does not limit throughput: ten messages sent one after the other are not a round trip apart."""
    async with _link(LinkConditions(rtt_s=0.4)) as proxy, _connection(proxy) as (reader, writer):
        started = time.monotonic()
        for _ in range(10):
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.01)
        await reader.readexactly(10_000)
        elapsed_s = time.monotonic() - started
        assert 0.4 <= elapsed_s < 10 * 0.4


async def test_jitter_keeps_the_order() -> None:
    async with _link(LinkConditions(jitter_s=0.02)) as proxy, _connection(proxy) as (reader, writer):
        sent = [f"{number:04d}".encode() for number in range(50)]
        for message in sent:
            writer.write(message)
            await asyncio.sleep(0.001)
        assert await reader.readexactly(200) == b"".join(sent)


async def test_cut_resets_connections_and_refuses_new_ones() -> None:
    async with _link(LinkConditions()) as proxy, _connection(proxy) as (reader, _):
        proxy.cut()
        assert await _is_closed(reader)
        async with _connection(proxy, is_warm=False) as (new_reader, _):
            assert await _is_closed(new_reader)
        proxy.restore()
        async with _connection(proxy):
            pass


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_blackhole_is_silent_until_restored() -> None:
    async with _link(LinkConditions()) as proxy, _connection(proxy) as (reader, writer):
        proxy.blackhole()
        writer.write(b"lost?")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read(5)
        proxy.restore()
        assert await reader.readexactly(5) == b"lost?"


async def test_closing_one_end_closes_the_other() -> None:
    async def greet_and_leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"bye")
        writer.close()

    server = await asyncio.start_server(greet_and_leave, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with delay_proxy(port, LinkConditions(rtt_s=0.05)) as proxy, _connection(proxy, is_warm=False) as (reader, _):
        assert await reader.read() == b"bye"
    server.close()


async def test_no_server_behind_it_closes_the_connection(unused_tcp_port: int) -> None:
    async with delay_proxy(unused_tcp_port) as proxy, _connection(proxy, is_warm=False) as (reader, _):
        assert await _is_closed(reader)
