"""/livez and /readyz: what a kubelet or a balancer asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send


class Probes:
    """Answers /livez and /readyz: whether a restart would help, and whether requests are welcome.

    The application has /health and /ping, and is not asked while they are not.
    """

    def __init__(self, app: ASGIApp, is_healthy: Callable[[], Awaitable[bool]] | None = None) -> None:
        self._app = app
        self._is_healthy = is_healthy
        self.is_alive = self.is_ready = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/livez":
            await _tell(send, 200 if self.is_alive else 503)
        elif path == "/readyz" or (path in ("/health", "/ping") and not self.is_ready):
            is_ready = self.is_ready and (self._is_healthy is None or await self._is_healthy())
            await _tell(send, 200 if is_ready else 503)
        else:
            await self._app(scope, receive, send)


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that has nothing: 404."""
    await _tell(send, 404)


async def _tell(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
