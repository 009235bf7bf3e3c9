"""Stand-ins for servers of other projects: each has a part of OpenAI's API; words in the prompt make it fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

TEXT = ("It", " was", " a", " dark", " night")
"""Pieces of every answer, each sent as one chunk."""
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class ForeignServer:
    """Server that lists one model, reports no token usage, and refuses seeds and `stream_options`.

    A prompt with "too long" or "busy" in it gets an error status. After two chunks of the answer, "dies" closes the
    connection, "fails" sends an error event, and "slow" waits 30 s. `bodies` has the bodies of all requests so far.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.port = self.num_connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until either side closes it."""
        self.num_connections += 1
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
        """Answer one request; return whether the connection stays open."""
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
        writer.write(STREAM_HEAD)
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


class ScriptedServer(ForeignServer):
    """Server whose answers a test determines.

    Args:
        script: function from a request's body to the answer's status code, content type and text.
    """

    def __init__(self, script: Callable[[dict[str, Any]], tuple[int, str, str]]) -> None:
        super().__init__()
        self._script = script

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if path == "/v1/models":
            return await super()._answer(path, body, writer)
        self.bodies.append(body)
        _send_text(writer, *self._script(body))
        return True


class TimedServer(ForeignServer):
    """Server that streams `num_tokens` tokens in each answer: the first after 5 ms, the others 10 ms apart."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def text(self, prompt: str) -> str:
        return "".join(self._texts(prompt))

    def _texts(self, prompt: str) -> list[str]:
        return [f" {prompt}\n\u00e9:{number}" for number in range(self._num_tokens)]

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if path == "/v1/models":
            return await super()._answer(path, body, writer)
        writer.write(STREAM_HEAD)
        for number, text in enumerate(self._texts(body["prompt"]), start=1):
            await asyncio.sleep(0.005 if number == 1 else 0.01)
            reason = "stop" if number == self._num_tokens else None
            usage = {"prompt_tokens": 1, "completion_tokens": number}
            _event(writer, {"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        await asyncio.sleep(0.001)  # the end comes in a packet of its own
        writer.write(b"0\r\n\r\n")
        return True


def _send(writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
    _send_text(writer, status, "application/json", json.dumps(document))


def _send_text(writer: asyncio.StreamWriter, status: int, kind: str, text: str) -> None:
    body = text.encode()
    head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    _chunk(writer, f"data: {json.dumps(document)}\n\n".encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


ServerT = TypeVar("ServerT", bound=ForeignServer)


@asynccontextmanager
async def serving(foreign: ServerT) -> AsyncGenerator[ServerT, None]:
    """Run the server `foreign` on a free port until the block is left; yield it with its `port` set."""
    server = await asyncio.start_server(foreign.serve, "127.0.0.1", 0)
    foreign.port = server.sockets[0].getsockname()[1]
    try:
        yield foreign
    finally:
        server.close()


def foreign_server() -> AbstractAsyncContextManager[ForeignServer]:
    return serving(ForeignServer())
