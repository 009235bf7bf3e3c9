"""A stand-in for a proxy, with just enough HTTP/2 to answer every request with an error status of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

_PREFACE_BYTES, _HEAD_BYTES = 24, 9
_HEADERS, _SETTINGS, _PING = 1, 4, 6
_ACK, _ENDS = b"\x01", b"\x05"
_STATUS_BY_NAME = b"\x08\x03"  # a literal field named ":status", of three characters


@dataclass
class Proxy:
    """Port of the stand-in proxy, and the number of requests that it has answered."""

    port: int = 0
    num_answers: int = 0


@asynccontextmanager
async def answering(status: int, port: int) -> AsyncGenerator[Proxy, None]:
    """Listen on a port until the block is left; answer every request with the HTTP status `status`.

    Yield the stand-in, whose `num_answers` counts the answers.
    """
    proxy, ends = Proxy(port), asyncio.Queue[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.put_nowait(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readexactly(_PREFACE_BYTES)
            writer.write(_frame(_SETTINGS))
            while True:
                head = await reader.readexactly(_HEAD_BYTES)
                payload, kind, stream = await reader.readexactly(int.from_bytes(head[:3])), head[3], head[5:]
                if kind in (_SETTINGS, _PING) and not head[4] & 1:
                    writer.write(_frame(kind, payload if kind == _PING else b"", flags=_ACK))
                if kind == _HEADERS:
                    proxy.num_answers += 1
                    writer.write(_frame(_HEADERS, _STATUS_BY_NAME + str(status).encode(), flags=_ENDS, stream=stream))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield proxy
    finally:
        server.close()
        while not ends.empty():
            end = ends.get_nowait()
            end.transport.abort()
            with suppress(ConnectionError):
                await end.wait_closed()


def _frame(kind: int, payload: bytes = b"", *, flags: bytes = b"\x00", stream: bytes = bytes(4)) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind]) + flags + stream + payload
