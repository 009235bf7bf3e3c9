"""uvicorn's HTTP protocol, with limits on what a connection may send, and on how long it may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from specdec.inference.gateway.answers.documents import encoded
from specdec.inference.gateway.answers.errors import ApiError

MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 100
HEADERS_TIMEOUT_S = 10.0
"""Most seconds from a connection's beginning, or from the first byte of a later request, to the end of its headers."""
BODY_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 4096
"""Limit of connections, each of which takes a file descriptor; further ones are closed at once."""
API_KEY = b"x-api-key"
"""Header in which Anthropic's clients send a token."""
_ONLY_ONCE = (b"host", b"authorization", API_KEY)
MAX_PIPELINED = 64
"""Most requests of one connection that wait for earlier answers; a client can send 14,000 of them in one read."""


def _half_closed() -> bytes:
    message = "the client ended its side of the connection before the answer, which ends the request: leave it open"
    body = encoded(ApiError(400, message, code="half_closed").body()).encode()
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"HTTP/1.1 400 Bad Request\r\n{head}\r\n\r\n".encode() + body


class LimitedProtocol(HttpToolsProtocol):
    """One HTTP connection, which ends when its client breaks a limit of headers, requests or time."""

    stall_timeout_s = 30.0
    """Seconds in which the client reads nothing although data waits, after which the connection is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_bytes_between = self._num_headers = self._num_unread = 0
        self._seen: set[bytes] = set()  # headers of this request that may come once
        self._in_headers = True
        self._deadline: asyncio.TimerHandle | None = None
        self._owed_s: float | None = None  # left for what has begun to come in; None: nothing has
        self._stalled: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []  # uvicorn's: of pipelined requests it knows the newest alone

    def connection_made(self, transport: Any) -> None:
        """Accept a connection, or close it at once if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
            return
        self._expect_within(HEADERS_TIMEOUT_S)

    def eof_received(self) -> None:
        """Close the connection when the client ends its side; an unanswered request first gets status 400."""
        if self.cycle is not None and not self.cycle.response_started:
            self.transport.write(_half_closed())

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of a connection that has ended."""
        self._expect_within(None)
        self.resume_writing()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begin a request at its first byte; raise ValueError, which gives status 400, if too many requests wait."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError(f"more than {MAX_PIPELINED} requests wait for their answers")
        self._num_headers = 0
        self._seen.clear()
        self._in_headers = True
        self._expect_within(HEADERS_TIMEOUT_S)
        super().on_message_begin()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; close the connection if unfinished headers, or trailers after a body, are too long."""
        self._num_bytes_between += len(data)
        super().data_received(data)
        if self._num_bytes_between > MAX_HEADER_BYTES:
            self.transport.abort()
        self._leave_closed()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of a request; ignore those that come after its body, since no proxy checks them.

        Raises:
            ValueError: there are too many, one is too long, or one comes twice that may not; it gives status 400.
        """
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS or len(value) > MAX_HEADER_BYTES:
            raise ValueError(f"more than {MAX_HEADERS} headers, or one above {MAX_HEADER_BYTES} bytes")
        if not self._in_headers:
            return
        if name.lower() in _ONLY_ONCE:  # RFC 9112, 3.2: a proxy may have believed the other one
            if name.lower() in self._seen:
                raise ValueError(f"more than one {name.decode()} header")
            self._seen.add(name.lower())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the time limit of the headers, and start that of the body."""
        self._in_headers = False
        self._num_bytes_between = 0
        self._expect_within(BODY_TIMEOUT_S)
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the request's body, and set the count of bytes outside of bodies to 0."""
        self._num_bytes_between = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the time limit of the request, since all of it has arrived."""
        self._num_bytes_between = 0
        self._expect_within(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the time limit of a next request, if the client began to send one during the answer."""
        super().on_response_complete()
        self._arm(self._owed_s)

    def pause_writing(self) -> None:
        """Begin to watch whether the client reads, as it reads more slowly than this server writes."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop watching the client, because it has read what was written."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def _watch_reader(self) -> None:
        """Start a timer that checks, after `stall_timeout_s`, whether the client has read anything since now."""
        self._num_unread = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self.stall_timeout_s, self._drop_or_watch)

    def _drop_or_watch(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unread:
            self._watch_reader()
        else:
            self.transport.abort()
            self._leave_closed()

    def _leave_closed(self) -> None:
        """Mark answers as disconnected if a limit has closed the connection: uvloop would raise at each write to it."""
        if self.transport.is_closing():
            for cycle in self._cycles:
                cycle.disconnected = True
                cycle.message_event.set()

    def _expect_within(self, seconds: float | None) -> None:
        """Close the connection after `seconds` (None: never), unless another call sets a new limit before.

        The time does not run while a request is answered; `on_response_complete` starts it afterwards.
        """
        self._owed_s = seconds
        is_answering = self.cycle is not None and not self.cycle.response_complete
        self._arm(None if is_answering else seconds)

    def _arm(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
