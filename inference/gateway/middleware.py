"""What stands before the application: a limit on bodies, a count of answers, and which requests get a span.

Plain ASGI, so that streams stay streams.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from fastapi.telemetry import TelemetryConfig
from prometheus_client import CollectorRegistry, Counter
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.gateway.errors import ApiError

if TYPE_CHECKING:
    from inference.observe.spans import Spans


REQUEST_ID = b"x-request-id"
_HARMLESS = re.compile(rb"[\x21-\x7e]{1,128}")


class BodyLimit:
    """Refuses bodies above `max_bytes` with 413, whether they say their length or not."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._message = f"the body is above the limit of {max_bytes} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await _answer(send, ApiError(413, self._message))
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


async def _answer(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RequestId:
    """Gives every answer the id that its request came with in X-Request-Id, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID, b"")
        request_id = given if _HARMLESS.fullmatch(given) else secrets.token_hex(16).encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        await self._app(scope, receive, named)


class AnswerCount:
    """Counts answers by path and status; paths that are not ours are one."""

    def __init__(self, app: ASGIApp, *, registry: CollectorRegistry, paths: frozenset[str]) -> None:
        self._app = app
        self._paths = paths
        self._answers = Counter(
            "specdec_http_responses", "HTTP answers, by path and status.", ("path", "status"), registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
