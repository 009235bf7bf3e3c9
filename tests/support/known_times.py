"""Server of known times, over HTTP and gRPC: each token's text is the time at which it was sent.

The first token follows a request by `first_s`, the others follow each other by `GAP_S`. Times are those of the clock
that all processes of a machine share; the first text also has the time at which the request was read. There is no model
and no server library, so nothing delays a token before its socket.
"""

from __future__ import annotations

import asyncio
import functools
import json
from multiprocessing.synchronize import Event
from typing import Any

from specdec.comparison.plan.record import RequestRecord
from specdec.inference.commit import Delta, Finished, FinishReason, Started, Timings
from specdec.inference.workers.calls.convert import card_to_message, event_to_message
from specdec.inference.workers.completion import ModelCard

GAP_S, NUM_TOKENS = 0.01, 20
_PLACE = b"_____________ "
"""Place of a time in a prepared message. Each time has as many characters, so lengths in the message stay true."""
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW = 0, 1, 4, 6, 8
_STREAM = b"\xffsid"
"""Place of a stream's number in a prepared frame."""


def _frame(kind: int, payload: bytes = b"", flags: int = 0, stream: bytes = bytes(4)) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream + payload


_HTTP_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_GRPC_HEAD = _frame(_HEADERS, b"\x88\x0f\x10\x10application/grpc", 4, _STREAM)
_GRPC_END = _frame(_HEADERS, b"\x00\x0bgrpc-status\x010", 5, _STREAM)
"""Frames that begin and end an answer of gRPC: status 200 and the content type; status OK."""


def http_parts() -> list[bytes]:
    """Return the parts of an answer over HTTP, one for each token."""
    parts = []
    for number in range(1, NUM_TOKENS + 1):
        choice = {"index": 0, "text": _text(number), "finish_reason": "stop" if number == NUM_TOKENS else None}
        usage = {"prompt_tokens": 1, "completion_tokens": number}
        parts.append(_chunk(f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\n".encode()))
    end = _chunk(b"data: [DONE]\n\n") + _chunk(b"")
    return [_HTTP_HEAD + parts[0], *parts[1:-1], parts[-1] + end]


def grpc_parts() -> list[bytes]:
    """Return the parts of an answer over gRPC, one for each token; senders fill in the HTTP/2 stream's number."""
    reasons = [None] * (NUM_TOKENS - 1) + [FinishReason.LENGTH]
    tokens = [Delta(i, (7,), 0, 0, Timings(), reason, text=_text(i)) for i, reason in enumerate(reasons, start=1)]
    first, end = _message(event_to_message(Started(1, 0))), _message(event_to_message(Finished(FinishReason.LENGTH)))
    parts = [_message(event_to_message(token)) for token in tokens]
    return [_GRPC_HEAD + first + parts[0], *parts[1:-1], parts[-1] + end + _GRPC_END]


def _text(number: int) -> str:
    return (_PLACE * (2 if number == 1 else 1)).decode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _message(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return _frame(_DATA, bytes(1) + len(data).to_bytes(4) + data, stream=_STREAM)


class _Connection(asyncio.Protocol):
    """Connection of a client, which answers each request with the same parts."""

    def __init__(self, parts: list[bytes], first_s: float) -> None:
        self._parts, self._first_s = parts, first_s
        self._loop, self._received = asyncio.get_running_loop(), b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def _answer(self, stream: bytes = _STREAM) -> None:
        read_s = self._loop.time()

        def send(number: int, part: bytes) -> None:
            self._transport.write(_dated(part, self._loop.time()).replace(_STREAM, stream))
            if number < NUM_TOKENS:
                due_s = read_s + self._first_s + number * GAP_S
                self._loop.call_at(due_s, send, number + 1, self._parts[number])

        self._loop.call_at(read_s + self._first_s, send, 1, _dated(self._parts[0], read_s))


def _dated(part: bytes, at_s: float) -> bytes:
    return part.replace(_PLACE, b"%013.5f " % at_s, 1)


class HttpConnection(_Connection):
    """Connection to an OpenAI-compatible API."""

    def data_received(self, data: bytes) -> None:
        """Answer each HTTP request that has arrived in full."""
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, rest = self._received.partition(b"\r\n\r\n")
            length = int((head.lower().partition(b"content-length:")[2].split() or [b"0"])[0])
            if len(rest) < length:
                return
            self._received = rest[length:]
            if head.startswith(b"GET"):
                model = b'{"data": [{"id": "known"}]}'
                self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(model), model))
            else:
                self._answer()


class GrpcConnection(_Connection):
    """Connection to GetModel and Generate of a GenerationService, with the little of HTTP/2 that these calls need."""

    _num_opening = 24  # bytes that a client sends before its first frame

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send a flow-control window of 1 GiB, so that the client never has to wait for more."""
        super().connection_made(transport)
        self._transport.write(_frame(_SETTINGS) + _frame(_WINDOW, (1 << 30).to_bytes(4)))

    def data_received(self, data: bytes) -> None:
        """Answer each HTTP/2 frame that has arrived in full."""
        self._received += data
        opening = self._num_opening
        self._received, self._num_opening = self._received[opening:], max(0, opening - len(self._received))
        while len(self._received) >= (end := 9 + int.from_bytes(self._received[:3])):
            frame, self._received = self._received[:end], self._received[end:]
            self._take(frame[3], frame[4], frame[5:9], frame[9:])

    def _take(self, kind: int, flags: int, stream: bytes, payload: bytes) -> None:
        if kind in (_SETTINGS, _PING) and not flags & 1:
            self._transport.write(_frame(kind, payload if kind == _PING else b"", flags=1))
        elif kind == _DATA and len(payload) == 5:  # GetModel's request is empty
            card = _message(card_to_message(ModelCard("known", "target", 1000, 100, "0")))
            self._transport.write((_GRPC_HEAD + card + _GRPC_END).replace(_STREAM, stream))
        elif kind == _DATA and payload:
            self._answer(stream)


def serve(ports: tuple[int, int], first_s: float, ready: Event) -> None:
    """Serve HTTP and gRPC at these ports until killed; set the event when both listen."""

    async def forever() -> None:
        loop = asyncio.get_running_loop()
        kinds = (HttpConnection, http_parts()), (GrpcConnection, grpc_parts())
        for (kind, parts), port in zip(kinds, ports, strict=True):
            await loop.create_server(functools.partial(kind, parts, first_s), "127.0.0.1", port)
        ready.set()
        await asyncio.Event().wait()

    asyncio.run(forever())


def known_times(record: RequestRecord) -> tuple[float, list[float]]:
    """Return the time at which the server read a request, and the times at which it sent its tokens, in seconds."""
    read_s, *sent_s = (float(word) for word in record.text.split())
    return read_s, sent_s
