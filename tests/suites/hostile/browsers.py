"""Attacks of the hostile suite over HTTP; each counts the statuses of its requests in `seen`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress

from tests.suites.hostile.scene import Recipe, Scene, Seen


def _array(element: str, count: int) -> str:
    return "[" + ",".join([element] * count) + "]"


def _object(fields: Iterable[str]) -> str:
    return "{" + ",".join(fields) + "}"


SHAPES: dict[str, str] = {
    "a million wrong parts": '{"messages":[{"role":"u","content":' + _array("0", 1_000_000) + "}]}",
    "a million wrong ids": '{"prompt":' + _array('"a"', 700_000) + "}",
    "ids that are right": '{"prompt":' + _array("7", 1_500_000) + "}",
    "unknown fields": _object(f'"f{index}":0' for index in range(200_000)),
    "wrong biases": '{"prompt":"x","logit_bias":' + _object(f'"a{index}":0' for index in range(200_000)) + "}",
    "nested brackets": "[" * 200_000,
    "many messages": '{"messages":' + _array('{"role":"u","content":""}', 100_000) + "}",
    "a long text": json.dumps({"prompt": "lorem ipsum " * 300_000}),
    "beyond the limit": '"' + "x" * 9_000_000 + '"',
    "a schema for 4096 answers": json.dumps(
        {"prompt": ["x"] * 64, "n": 64, "guided_json": {"anyOf": [{"enum": ["a"] * 10}] * 900}}
    ),
    "a text for 32 answers": json.dumps({"prompt": "\U00012345" * 20_000, "n": 32}, ensure_ascii=False),
    "a schema of numbers": '{"prompt":"x","guided_json":{"enum":' + _array(_array("7", 1000), 900) + "}}",
    "many characters": json.dumps({"prompt": "\U00012345" * 600_000}, ensure_ascii=False),
    "deep brackets": '{"prompt":"x","vllm_xargs":' + '{"a":' * 950 + "1" + "}" * 951,
    "a long number": '{"prompt":"x","seed":' + "9" * 1_000_000 + "}",
}
"""Request bodies whose validation is slow, by the reason."""


def request(body: bytes, *, path: str = "/v1/completions") -> bytes:
    """Return the bytes of an HTTP POST request with this JSON body."""
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body


async def post(port: int, body: bytes, seen: Seen, *, path: str = "/v1/completions") -> None:
    """Send a body by POST on a new connection; count the answer's status in `seen`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    status = "closed"
    with suppress(OSError, TimeoutError):
        writer.write(request(body, path=path))
        async with asyncio.timeout(30):
            status = (await reader.readline()).decode(errors="replace").split(" ")[1:2][0]
    seen[f"http {status}"] += 1
    writer.transport.abort()


async def body_shapes(scene: Scene, seen: Seen) -> None:
    """Attack: send JSON bodies that take long to validate."""
    for port in scene.http_ports:
        for body in SHAPES.values():
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                await post(port, body.encode(), seen, path=path)


async def header_floods(scene: Scene, seen: Seen) -> None:
    """Attack: send 20 KB header fields without end."""
    for port in scene.http_ports:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with suppress(OSError):
            for index in range(5000):
                if reader.at_eof() or writer.transport.is_closing():
                    break
                writer.write(b"x-%d: %s\r\n" % (index, b"a" * 20_000))
                await writer.drain()
                seen["headers"] += 1
        writer.transport.abort()


async def pipelined(scene: Scene, seen: Seen) -> None:
    """Attack: send thousands of requests on one connection without waiting for any answer."""
    one = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for index in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", scene.http_ports[index % 2])
        writer.write(one * 6500)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        seen["pipelined"] += 6500


async def leaving_browsers(scene: Scene, seen: Seen) -> None:
    """Attack: ask for streamed answers, and close the connections after 0 to 38 ms."""
    body = json.dumps({"prompt": "x", "max_tokens": 300, "stream": True, "ignore_eos": True}).encode()
    for index in range(200):
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.http_ports[index % 2])
        writer.write(request(body))
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(0.002 * (index % 20)):
                await reader.read(100)
        writer.transport.abort()
        seen["left"] += 1


async def unread_streams(scene: Scene, seen: Seen) -> None:
    """Attack: ask for streamed answers with several choices and log-probabilities, and never read them."""
    fields = {"prompt": "x", "n": 4, "max_tokens": 200, "logprobs": 5, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    while True:
        writers = []
        for port in scene.http_ports:
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request(body))
            writers.append(writer)
        await asyncio.sleep(12)
        for writer in writers:
            writer.transport.abort()
        seen["unread"] += len(writers)


async def slow_headers(scene: Scene, seen: Seen) -> None:
    """Attack: send requests a byte per second, stop halfway through bodies, and keep idle connections open."""
    first = (b"", b"G", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    dialled = [await asyncio.open_connection("127.0.0.1", scene.http_ports[index % 2]) for index in range(300)]
    for index, (_, writer) in enumerate(dialled):
        writer.write(first[index % 3])
    while True:
        await asyncio.sleep(1)
        open_ones = [
            (reader, writer) for reader, writer in dialled if not reader.at_eof() and not writer.transport.is_closing()
        ]
        seen["slow (closed)"] = len(dialled) - len(open_ones)
        for index, (_, writer) in enumerate(open_ones):
            if index % 3 == 1:
                with suppress(OSError):
                    writer.write(b"x")


QUICK: tuple[Recipe, ...] = (body_shapes, header_floods, pipelined, leaving_browsers)
PATIENT: tuple[Recipe, ...] = (unread_streams, slow_headers)
