"""Time limits that options of gRPC channels and servers set; in these tests each limit is a tenth of the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from specdec.comparison.run.proxy import delay_proxy
from specdec.grpc_comm.options import CHANNEL_OPTIONS, SERVER_OPTIONS

KEEPALIVE = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")


async def test_a_stream_over_a_link_that_fell_silent_ends() -> None:
    """A stream over a connection that fell silent ends within 15 s; here the limit is 1.5 s.

    Regression: gRPC has a second timeout for pings, of a minute, which kept the slot of a session whose client was
    gone.
    """
    began, ended = asyncio.Event(), asyncio.Event()

    async def serve(request: object, context: object) -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    handler: Any = grpc.stream_stream_rpc_method_handler(serve)
    server = grpc.aio.server(options=[(name, ms // 10 if name in KEEPALIVE else ms) for name, ms in SERVER_OPTIONS])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Silent", {"Wait": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with delay_proxy(port) as proxy, grpc.aio.insecure_channel(proxy.address) as channel:
            call: Any = channel.stream_stream("/test.Silent/Wait")()
            await asyncio.wait_for(began.wait(), 60)
            proxy.blackhole()
            await asyncio.wait_for(ended.wait(), 40)
            call.cancel()
    finally:
        await server.stop(None)


@asynccontextmanager
async def naming_peers(**instead: int) -> AsyncGenerator[str, None]:
    """Yield the address of a server whose streams send the client's address every 0.1 s.

    `instead` replaces values of SERVER_OPTIONS, with __ for each dot in a name.
    """

    async def serve(request: object, context: Any) -> None:
        for _ in range(12):
            await context.write(context.peer().encode())
            await asyncio.sleep(0.1)

    handler: Any = grpc.unary_stream_rpc_method_handler(serve)
    given = {name.replace("__", "."): value for name, value in instead.items()}
    server = grpc.aio.server(options=[(name, given.get(name, value)) for name, value in SERVER_OPTIONS])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Peers", {"Name": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_an_old_connection_takes_no_new_stream() -> None:
    """A new stream is not opened on a connection older than a limit, so that load balancers can move clients."""
    async with naming_peers(grpc__max_connection_age_ms=300) as address, grpc.aio.insecure_channel(address) as channel:
        name: Any = channel.unary_stream("/test.Peers/Name")
        running = name(b"", timeout=60)
        first = await running.read()
        await asyncio.sleep(0.8)
        assert await name(b"", timeout=60).read() != first
        assert [await running.read() for _ in range(11)] == [first] * 11


async def test_connections_have_a_number() -> None:
    limit = "grpc__max_allowed_incoming_connections"
    async with naming_peers(**{limit: 2}) as address, AsyncExitStack() as stack:
        codes = []
        for _ in range(3):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            name: Any = channel.unary_stream("/test.Peers/Name")
            try:
                codes.append(bool(await name(b"", timeout=1).read()))
            except grpc.aio.AioRpcError:
                codes.append(False)
        assert codes == [True, True, False]


async def test_a_dial_into_a_black_hole_ends_soon() -> None:
    """A client whose first attempts got no reply connects soon after a server is there: within 3 s, here 0.3 s.

    Regression: each attempt to connect took gRPC's own 20 s.
    """

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    hole = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = hole.sockets[0].getsockname()[1]
    options = [(name, value // 10 if "backoff" in name else value) for name, value in CHANNEL_OPTIONS]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        channel.get_state(try_to_connect=True)
        await asyncio.sleep(0.1)
        hole.close()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            await asyncio.wait_for(channel.channel_ready(), 15)
        finally:
            await server.stop(None)
