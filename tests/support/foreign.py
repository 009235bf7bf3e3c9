"""A server of somebody else: OpenAI-compatible as far as it likes, and in trouble where the prompt says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

TEXT = ("It", " was", " a", " dark", " night")
"""What it answers, a chunk each, whatever the seed."""


class ForeignServer:
    """Knows neither usage nor seeds, refuses fields that it does not know, and tells no model but its name."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, with any number of requests."""
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                lengths = [line for line in head.lower().splitlines() if line.startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0].partition(":")[2])) if lengths else b""
                if not await self._answer(head.split()[1], json.loads(body or b"{}"), writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        if path == "/v1/models":
            _send(writer, 200, {"data": [{"id": "theirs"}]})
            return True
        if path not in ("/v1/completions", "/v1/chat/completions"):
            _send(writer, 404, {"error": "no such path"})
            return True
        self.bodies.append(body)
        asked = body.get("prompt") or body["messages"][-1]["content"]
        if "too long" in asked:
            _send(writer, 400, {"error": {"message": "the prompt is too long"}})
            return True
        if body.keys() & {"stream_options", "seed"}:
            _send(writer, 422, {"error": "a field is not known"})
            return True
        if "busy" in asked:
            _send(writer, 503, {"error": {"message": "come back later"}})
            return True
        return await self._stream(asked, "messages" in body, writer)

    async def _stream(self, asked: str, is_chat: bool, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, text in enumerate(TEXT):
            if number == 2 and "dies" in asked:
                return False
            if number == 2 and "fails" in asked:
                _event(writer, {"error": {"message": "out of memory", "code": 500}})
                break
            if number == 2 and "slow" in asked:
                await writer.drain()
                await asyncio.sleep(30.0)
            said = {"delta": {"content": text}} if is_chat else {"text": text}
            reason = "stop" if number == len(TEXT) - 1 else None
            _event(writer, {"choices": [{"index": 0, **said, "finish_reason": reason}]})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True


def _send(writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    _chunk(writer, f"data: {json.dumps(document)}\n\n".encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@asynccontextmanager
async def foreign_server() -> AsyncGenerator[ForeignServer, None]:
    foreign = ForeignServer()
    server = await asyncio.start_server(foreign.serve, "127.0.0.1", 0)
    foreign.port = server.sockets[0].getsockname()[1]
    try:
        yield foreign
    finally:
        server.close()
