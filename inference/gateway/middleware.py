"""What stands before the application: limits on bodies, a count of answers, and which requests get a span.

Plain ASGI, so that streams stay streams; all of it is HTTP, since a port has neither websockets nor a lifespan.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CollectorRegistry, Counter
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.caller import ANYBODY, Right, audit, harmless_id, is_audited, request_id, serving
from inference.errors import ForbiddenError, UnauthenticatedError
from inference.gateway.errors import ApiError, from_error
from inference.workers.access import Access, rights_of_path
from inference.workers.status import code_name

if TYPE_CHECKING:
    from inference.observe.spans import Spans

REQUEST_ID = b"x-request-id"


class BodyLimit:
    """Refuses bodies above `max_bytes` with 413, whether they say their length or not."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._message = f"the body is above the limit of {max_bytes} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await ApiError(413, self._message).answer(connection="close")(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._message)  # of all exceptions, FastAPI lets only this one out
            return message

        await self._app(scope, counted, send)


MAX_ITEMS = 1024
"""Of a list or an object of a body, unless it is a list of token ids."""
_SMALL_BYTES = 8 * 1024
_INLINE_BYTES = 32 * 1024
_DOCUMENT = "specdec.document"
"""In a request's scope: its body as JSON, if that was read already."""


class ShapeLimit:
    """Refuses bodies with more items than any request has, before each of them is found wrong.

    Pydantic collects every error, some 10 us and 1.5 kB each: two megabytes of wrong items took ten seconds. Bodies
    that are small, or no JSON, or too long in all, are others' affair.

    Args:
        max_bytes: of a body; longer ones are `BodyLimit`'s.
        max_ids: says how many token ids a prompt of the present model may have.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_ids: Callable[[], int]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_ids = max_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        messages = await _body(receive, self._max_bytes)
        body = b"".join(message.get("body", b"") for message in messages)
        if _SMALL_BYTES < len(body) <= self._max_bytes:
            read = partial(_read, body, self._max_ids())
            document, fault = await asyncio.to_thread(read) if len(body) > _INLINE_BYTES else read()
            if fault is not None:
                await ApiError(400, fault).answer(connection="close")(scope, receive, send)
                return
            if document is not None:
                scope[_DOCUMENT] = document

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)


async def _body(receive: Receive, max_bytes: int) -> list[Message]:
    """The messages of a body, to its end, or as far as its length is allowed."""
    messages: list[Message] = []
    num_bytes = 0
    while num_bytes <= max_bytes:
        message = await receive()
        messages.append(message)
        num_bytes += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    return messages


_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[-+0-9.,eE\s]++|[a-zA-Z]++|.', re.DOTALL)
"""What JSON is made of: strings, runs of numbers, words, brackets and colons."""
_MAX_PARTS = 8 * 16 * MAX_ITEMS
_MAX_NUMBERS = 1_000_000


def _is_crowded(body: bytes) -> bool:
    """Whether it has more parts than can be parsed in passing.

    The parser keeps the interpreter to itself, on whatever thread it runs: eight megabytes of members took 0.4 s, in
    which nobody else was served. Here others have their turn between two parts.
    """
    num_numbers = 0
    for num_parts, part in enumerate(_PARTS.finditer(body)):
        if not (run := part.group()).startswith(b'"'):
            num_numbers += run.count(b",")
        if num_parts > _MAX_PARTS or num_numbers > _MAX_NUMBERS:
            return True
    return False


def parse_fault(body: bytes) -> str | None:
    """What makes a body too dear to parse, or hides that it is."""
    if b"\0" in body:
        return "the body is not JSON in UTF-8: it has a zero byte"
    if _is_crowded(body):
        return f"the body has more than {_MAX_PARTS} strings, words and brackets, or {_MAX_NUMBERS} numbers"
    return None


class ReadOnceRoute(APIRoute):
    """A route whose bodies are not read again where `ShapeLimit` has read them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI's."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_ReadRequest(request.scope, request.receive))

        return handle


class _ReadRequest(Request):
    async def json(self) -> Any:
        return self.scope[_DOCUMENT] if _DOCUMENT in self.scope else await super().json()


def _read(body: bytes, max_ids: int) -> tuple[Any, str | None]:
    """The body as JSON, and what of it is out of proportion; two None if it is no JSON, which others tell."""
    if fault := parse_fault(body):
        return None, fault
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None, None
    return document, shape_fault(document, max_ids)


def shape_fault(document: Any, max_ids: int) -> str | None:
    """What of a body is out of proportion; None: nothing."""
    lists = [document.get("prompt"), document.get("tokens")] if isinstance(document, dict) else []
    lists += lists[0] if lists and isinstance(lists[0], list) and len(lists[0]) <= MAX_ITEMS else []
    of_ids = {id(each) for each in lists if _are_ids(each, max_ids)}  # elsewhere numbers are as dear as anything
    places = [document]
    while places:
        place = places.pop()
        if not isinstance(place, list | dict) or id(place) in of_ids:
            continue
        if len(place) > MAX_ITEMS:
            return f"a list or object of {len(place)} items exceeds the limit of {MAX_ITEMS} (token ids: {max_ids})"
        places.extend(place.values() if isinstance(place, dict) else place)
        if len(places) > 16 * MAX_ITEMS:
            return f"the body has more than {16 * MAX_ITEMS} items that are no token ids"
    return None


def _are_ids(place: Any, max_ids: int) -> bool:
    """Whether these are whole numbers from 0 on, and no more than the context holds; decided at C speed."""
    if not isinstance(place, list) or not 0 < len(place) <= max_ids:
        return False
    return set(map(type, place)) == {int} and min(place) >= 0


class RequestId:
    """Gives every answer the id that its request came with in X-Request-Id, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = harmless_id(dict(scope["headers"]).get(REQUEST_ID, b"").decode("latin-1"))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id.encode())]
            await send(message)

        with serving(ANYBODY, request_id):
            await self._app(scope, receive, named)


class HttpGate:
    """Lets requests in, as `Access` says, before anything of their bodies is read.

    Args:
        rights: which of them let one ask for a path; None is open to everybody.
    """

    def __init__(
        self, app: ASGIApp, *, access: Access, rights: Callable[[str], frozenset[Right] | None] = rights_of_path
    ) -> None:
        self._app = app
        self._access = access
        self._rights = rights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (rights := self._rights(scope["path"])) is None:
            await self._app(scope, receive, send)
            return
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        try:
            who = self._access.by_token(authorization, rights)
        except (UnauthenticatedError, ForbiddenError) as exc:
            audit(f"{code_name(exc)} at {scope['path'][:100]!r}: {exc}")
            await from_error(exc).answer(connection="close")(scope, receive, send)
            return

        async def accounted(message: Message) -> None:
            if who.name and message.get("status", 200) >= 400 and not is_audited():
                audit(f"{message['status']} at {scope['path'][:100]!r}")
            await send(message)

        with serving(who, request_id()):
            await self._app(scope, receive, accounted)


class AnswerCount:
    """Counts answers by path and status; paths that are not ours are one."""

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


PREFIX = "/v1/"


def http_spans(spans: Spans | None) -> TelemetryConfig:
    """Spans alone, which continue the trace that a client's headers name; none at all without `spans`."""
    if spans is None:
        return {"tracing": False, "metrics": False, "logs": False}
    return {
        "tracer_provider": spans.provider,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "exclude": _is_noise,
    }


def _is_noise(scope: MutableMapping[str, Any]) -> bool:
    """Health checks, scrapes, the page."""
    return scope["method"] != "POST" or not scope["path"].startswith(PREFIX)
