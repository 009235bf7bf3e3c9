"""A span around every generation over HTTP, which continues the trace that the client's headers name.

Plain ASGI, so that streams stay streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from inference.telemetry import Telemetry

PREFIX = "/v1/"
"""What is traced; health checks and scrapes would only be noise."""


class HttpSpans:
    """Opens a span per POST."""

    def __init__(self, app: ASGIApp, *, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": path}
        with self._telemetry.serving(f"{scope['method']} {path}", headers, attributes) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, noting)
