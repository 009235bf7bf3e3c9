"""What the options promise, with all their times divided by ten."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from grpc_comm.options import SERVER_OPTIONS
from inference.comparison.run.proxy import delay_proxy

KEEPALIVE = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")


async def test_a_stream_over_a_link_that_fell_silent_ends() -> None:
    """The story: gRPC has a second timeout for pings, of a minute; until then a dead session held its slot.

    Promised are 15 s, here 1.5; a minute would be more than the limit below.
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
            await asyncio.wait_for(began.wait(), 10)
            proxy.blackhole()
            await asyncio.wait_for(ended.wait(), 20)
            call.cancel()
    finally:
        await server.stop(None)
