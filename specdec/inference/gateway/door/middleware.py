"""ASGI middleware of the HTTP application: request ids, access, limits on bodies, and a count of answers.

It does not use Starlette's BaseHTTPMiddleware, so that streams stay streams. Every ASGI scope that it gets is of type
"http", since the ports have neither websockets nor a lifespan.
"""

from __future__ import annotations

import asyncio
import collections
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.grpc_comm.names import written
from specdec.inference.caller import (
    ANYBODY,
    Caller,
    Right,
    audit,
    caller,
    is_audited,
    request_context,
    request_id,
    safe_request_id,
)
from specdec.inference.errors import ForbiddenError, UnauthenticatedError
from specdec.inference.gateway.answers.errors import ApiError, from_error
from specdec.inference.gateway.door.protocol import API_KEY, BODY_TIMEOUT_S
from specdec.inference.workers.calls.access import Access, rights_of_path
from specdec.inference.workers.calls.status import code_name

REQUEST_ID = b"x-request-id"


MAX_UNFINISHED_BYTES = 256 * 1024 * 1024
"""Most bytes of all bodies that are still arriving; without it, 4096 connections could hold 8 MiB each for 30 s."""
_SMALL_BYTES = 8 * 1024
_INLINE_BYTES = 32 * 1024


class BodyLimit:
    """Middleware that refuses request bodies that are too long (413) or compressed (415), or have too many parts (400).

    Parts are the numbers, strings, words and brackets of JSON. A body that is still arriving is refused with 503 if all
    such bodies together have more than `MAX_UNFINISHED_BYTES`, or those of one account more than half of that.

    Args:
        max_bytes: longest body in bytes.
        max_numbers: function that returns how many numbers a body may have for the model that is served now.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_numbers: Callable[[], int]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_numbers = max_numbers
        self._unfinished = collections.Counter[str]()  # bytes by account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            messages = await self._checked(scope, receive)
        except ApiError as fault:
            await fault.answer(scope["path"], connection="close")(scope, receive, send)
            return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)

    async def _checked(self, scope: Scope, receive: Receive) -> list[Message]:
        """Return the ASGI messages with a request's body, or an empty list for requests other than POST.

        Raises:
            ApiError: the body is refused.
        """
        headers = dict(scope["headers"])
        coding, length = headers.get(b"content-encoding", b"").decode("latin-1"), headers.get(b"content-length", b"0")
        if coding.lower() not in ("", "identity"):
            message = f"Content-Encoding {coding[:40]!r} is not supported here: send the body as it is"
            raise ApiError(415, message, param="Content-Encoding", code="unsupported_content_encoding")
        num_bytes = int(length) if length.isdigit() else 0
        messages: list[Message] = []
        if scope["method"] == "POST" and num_bytes <= self._max_bytes:
            messages, num_bytes = await self._read(receive)
        if num_bytes > self._max_bytes:
            raise ApiError(413, f"the body is above the limit of {self._max_bytes} bytes")
        if num_bytes > _SMALL_BYTES and messages:
            body = b"".join(message.get("body", b"") for message in messages)
            find = partial(parse_fault, body, self._max_numbers())
            fault = await asyncio.to_thread(find) if num_bytes > _INLINE_BYTES else find()
            if fault is not None:
                raise fault
        return messages

    async def _read(self, receive: Receive) -> tuple[list[Message], int]:
        """Return a body's ASGI messages and its number of bytes; stop reading once that exceeds the allowed length.

        Raises:
            ApiError: the bodies that are arriving now, of all requests or of this account, have too many bytes.
        """
        messages: list[Message] = []
        num_bytes, account = 0, caller().account
        try:
            while num_bytes <= self._max_bytes:
                message = await receive()
                messages.append(message)
                size = len(message.get("body", b""))
                num_bytes += size
                self._unfinished[account] += size
                if message["type"] != "http.request" or not message.get("more_body"):
                    break
                self._check_room(account)
        finally:
            self._unfinished -= collections.Counter({account: num_bytes})  # drops accounts without a byte
        return messages, num_bytes

    def _check_room(self, account: str) -> None:
        limits = [(self._unfinished.total(), MAX_UNFINISHED_BYTES, "")]
        if account:
            limits.append((self._unfinished[account], MAX_UNFINISHED_BYTES // 2, " of one account"))
        for num_bytes, limit, whose in limits:
            if num_bytes > limit:
                message = f"unfinished bodies{whose} have {num_bytes} bytes, the limit is {limit}: send this one later"
                kind, code = "service_unavailable_error", "unavailable"
                raise ApiError(503, message, kind, code=code, retry_after_s=BODY_TIMEOUT_S)


_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[-+0-9.,eE\s]++|[a-zA-Z]++|.', re.DOTALL)
"""Parts into which a body is cut to count them: strings, runs of numbers, words, brackets and colons of JSON."""
_MAX_PARTS = 64 * 1024


def _is_crowded(body: bytes, max_numbers: int) -> bool:
    """Return whether a body has more than `_MAX_PARTS` parts, or more than `max_numbers` commas outside strings.

    Such a body takes too long to parse. While the JSON parser runs, on any thread, Python runs nothing else: it took
    0.4 s for eight megabytes of small members. This count takes longer, but lets other threads run between two parts.
    """
    num_numbers = 0
    for num_parts, part in enumerate(_PARTS.finditer(body), 1):
        if not (run := part.group()).startswith(b'"'):
            num_numbers += run.count(b",")
        if num_parts > _MAX_PARTS or num_numbers > max_numbers:
            return True
    return False


def parse_fault(body: bytes, max_numbers: int) -> ApiError | None:
    """Return the error for a body that must not be parsed, as it has too many parts or a zero byte; else None."""
    if b"\0" in body:
        return ApiError(400, "the body is not JSON in UTF-8: it has a zero byte")
    if _is_crowded(body, max_numbers):
        limits = f"{_MAX_PARTS} strings, words and brackets, or {max_numbers} numbers"
        return ApiError(400, f"the body has more than {limits}")
    return None


class RequestId:
    """Middleware that gives each answer the X-Request-Id of its request, or a new id.

    While a request is served, it is the current one (inference/caller.py), so that log lines name its id and peer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = safe_request_id(dict(scope["headers"]).get(REQUEST_ID, b"").decode("latin-1"))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id.encode())]
            await send(message)

        with request_context(ANYBODY, request_id, written(*scope["client"]) if scope.get("client") else "-"):
            await self._app(scope, receive, named)


def rights_of(scope: Scope) -> frozenset[Right] | None:
    """Return the rights of which the caller of a request needs at least one; None if no right is needed.

    A browser's preflight (method OPTIONS) needs none: it has no token, and every path answers it with an error.
    """
    return None if scope["method"] == "OPTIONS" else rights_of_path(scope["path"])


def _authorization(headers: Mapping[bytes, bytes]) -> str:
    """Return the header Authorization; without it, one made of the token in Anthropic's header, or an empty text."""
    key = headers.get(API_KEY)
    return headers.get(b"authorization", b"Bearer " + key if key else b"").decode("latin-1")


class HttpGate:
    """Middleware that lets `Access` admit or refuse each request before anything of its body is read.

    Args:
        rights: function that returns the rights of which a request's caller needs at least one; if it returns None,
            the request passes unchecked.
    """

    def __init__(
        self, app: ASGIApp, *, access: Access, rights: Callable[[Scope], frozenset[Right] | None] = rights_of
    ) -> None:
        self._app = app
        self._access = access
        self._rights = rights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (rights := self._rights(scope)) is None:
            await self._app(scope, receive, send)
            return
        try:
            who = self._access.by_token(_authorization(dict(scope["headers"])), rights)
        except (UnauthenticatedError, ForbiddenError) as exc:
            with request_context(Caller(exc.caller_name), request_id()):
                audit(f"{code_name(exc)} at {scope['path'][:100]!r}: {exc}")
            await from_error(exc).answer(scope["path"], connection="close")(scope, receive, send)
            return

        async def accounted(message: Message) -> None:
            if who.name and message.get("status", 200) >= 400 and not is_audited():
                audit(f"{message['status']} at {scope['path'][:100]!r}")
            await send(message)

        with request_context(who, request_id()):
            await self._app(scope, receive, accounted)


class StatusCount:
    """Middleware that counts answers by path and status; all paths outside `paths` are counted together, as "other"."""

    def __init__(self, app: ASGIApp, *, registry: CollectorRegistry, paths: frozenset[str]) -> None:
        self._app = app
        self._paths = paths
        self._answers = Counter(
            "specdec_http_responses", "HTTP answers, by path and status.", ("path", "status"), registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counting(message: dict[str, Any] | Message) -> None:
            if message["type"] == "http.response.start":
                self._answers.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting)
