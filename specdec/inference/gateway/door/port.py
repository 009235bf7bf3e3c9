"""HTTP port: uvicorn serves an ASGI application on this process's event loop. Health probes are answered here.

This module knows nothing of the application but its ASGI interface.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.grpc_comm.server import BACKLOG, PortTakenError, listener
from specdec.grpc_comm.tls import ServerTls
from specdec.inference.config import OPEN, ServerConfig, address
from specdec.inference.errors import ConfigError
from specdec.inference.gateway.answers.errors import ApiError
from specdec.inference.gateway.door.protocol import LimitedProtocol

logger = logging.getLogger(__name__)

LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")
MAX_HOST_CHARACTERS = 100
"""Limit of an unknown host's name in an error message."""
_PORT = re.compile(r"(?<=[^:]):\d+$")
_OWN_HOSTS = (
    "without --auth_file or TLS, a port on loopback answers for localhost alone, so that no web page reaches it by a "
    "name of its own; let the proxy send `Host: localhost`, or start the server with --auth_file or --insecure"
)


class Probes:
    """ASGI application that answers the probes /livez and /readyz, and passes other requests to the application `app`.

    /livez gets status 200 unless a restart of the process would help, and /readyz while requests are accepted; else
    503. While requests are not accepted, /health and /ping are answered like /readyz instead of being passed on.

    Args:
        is_healthy: function that must also return True for status 200 at /readyz; None: readiness needs only that
            requests are accepted.

    Attributes:
        is_alive: what /livez reports; False if a restart of the process would help.
        is_ready: True while requests are accepted.
    """

    def __init__(self, app: ASGIApp, is_healthy: Callable[[], Awaitable[bool]] | None = None) -> None:
        self._app = app
        self._is_healthy = is_healthy
        self.is_alive = self.is_ready = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/livez":
            await Response(status_code=200 if self.is_alive else 503)(scope, receive, send)
        elif path == "/readyz" or (path in ("/health", "/ping") and not self.is_ready):
            is_ready = self.is_ready and (self._is_healthy is None or await self._is_healthy())
            await Response(status_code=200 if is_ready else 503)(scope, receive, send)
        else:
            await self._app(scope, receive, send if self.is_ready else _closing(send))


def _closing(send: Send) -> Send:
    """Return a `send` that adds `Connection: close`, so that the client's next request opens a new connection."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return closing


class OwnHosts:
    """ASGI application that passes requests on to `app` if their Host header names this machine, and refuses others.

    Without it, a web page could let its own name resolve to 127.0.0.1, and read all answers (DNS rebinding).

    Args:
        host: address that the server listens on, which a request may name too.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._hosts = {*LOOPBACK, host}
        self._has_logged = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _PORT.sub("", dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
        if name.lower() in self._hosts:
            await self._app(scope, receive, send)
            return
        message = f"Host {name[:MAX_HOST_CHARACTERS]!r} is not this machine: {_OWN_HOSTS}"
        if not self._has_logged:  # once, since every client may send such requests
            self._has_logged = True
            logger.warning("refused a request: %s", message)
        fault = ApiError(400, message, param="Host", code="invalid_host")
        await fault.answer(scope["path"], connection="close")(scope, receive, send)


class HttpPort:
    """HTTP port of a process, whose `Host` (inference/serving/host.py) opens, drains and closes it.

    Args:
        name: name of the port in the log.
        probes: application that answers health probes, and passes other requests to the application to serve.
        port: number of the port; 0 takes a free one.
        server: host, security and time limits.
        tls: certificate; None for plain text.
    """

    def __init__(self, name: str, probes: Probes, port: int, server: ServerConfig, tls: ServerTls | None) -> None:
        self._name = name
        self._probes = probes
        self.port = port
        self._server_config = server
        self._tls = tls

    @property
    def ports(self) -> dict[str, int]:
        """Return a table with one entry, from the port's name in lower case to its number.

        If a free port is to be taken, the number is 0 until the port is open.
        """
        return {self._name.lower(): self.port}

    async def open(self) -> None:
        """Begin to listen on the port, and log where.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        host = self._server_config.host
        try:
            listening = listener(host, self.port)
        except PortTakenError as exc:
            raise ConfigError(str(exc)) from exc
        self.port = listening.getsockname()[1]
        app: ASGIApp = self._probes
        if self._server_config.on_loopback and self._server_config.security == OPEN:
            app = OwnHosts(app, host)
        self._server = _Uvicorn(_uvicorn_config(app, self._server_config, self._tls))
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name=self._name)
        await self._server.ready.wait()
        logger.info("%s on %s", self._name, self._url(host))

    def _url(self, host: str) -> str:
        return f"{'http' if self._tls is None else 'https'}://{address(host, self.port)}"

    def report(self, *, ready: bool, alive: bool = True) -> None:
        """Set what health probes report: `ready` if requests are accepted; `alive` is False if a restart would help."""
        self._probes.is_ready, self._probes.is_alive = ready, alive

    async def refuse_new(self) -> None:
        """Stop listening; running requests continue."""
        self._server.should_exit = True

    async def close(self) -> None:
        """Stop listening, and wait until running requests have ended, or are cancelled after the grace period."""
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)


class SidePort(HttpPort):
    """HTTP port for metrics or probes, which may open before the server is ready and stays open while it drains."""

    _is_open = False

    async def open(self) -> None:
        """Listen, unless the port is open already."""
        if not self._is_open:
            self._is_open = True
            await super().open()

    async def refuse_new(self) -> None:
        """Do nothing: scrapes and probes are answered until the end."""


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without its signal handlers, since the process has its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers, where uvicorn's own method would."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port as uvicorn's own method does, then set the event `ready`."""
        await super().startup(sockets)
        self.ready.set()


def _uvicorn_config(app: ASGIApp, server: ServerConfig, tls: ServerTls | None) -> uvicorn.Config:
    protocol = type("Protocol", (LimitedProtocol,), {"stall_timeout_s": server.stall_timeout_s})
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        access_log=False,  # a line per request costs more than a token; /metrics counts them
        log_config=None,
        log_level="warning",
        timeout_keep_alive=75,  # longer than usual clients keep a connection in a pool, so that they close it
        timeout_graceful_shutdown=max(1, math.ceil(server.grace_s) + 1),
        backlog=BACKLOG,
        server_header=False,
        reset_contextvars=True,  # otherwise a connection's next request would begin in the span of the last
        ssl_context_factory=None if tls is None else lambda *_: tls.http_context(),
    )
