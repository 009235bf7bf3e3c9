"""Which names a server on loopback answers to."""

from __future__ import annotations

import json

from starlette.types import ASGIApp, Receive, Scope, Send

from inference.config import is_loopback

_MISDIRECTED = 421


class LoopbackHosts:
    """Refuses requests that name another host than this one.

    A page in a browser may let its own name point to 127.0.0.1 (DNS rebinding), and would read all answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_ours(host := dict(scope["headers"]).get(b"host", b"").decode("latin-1")):
            await self._app(scope, receive, send)
            return
        message = f"this server listens on loopback, and answers to localhost, not to {host[:100]}"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "unknown_host"}
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": _MISDIRECTED, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


def _is_ours(host: str) -> bool:
    """Whether HOST or HOST:PORT is loopback; HTTP/1.0 names none."""
    name = host if host.endswith("]") or ":" not in host else host.rpartition(":")[0]
    return not host or is_loopback(name.lower())
