"""Runs the application on uvicorn inside this process's event loop, beside the gRPC server or alone."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from inference.config import ServerConfig, address
from inference.errors import ConfigError
from inference.gateway.app import Gateway, create_app
from inference.gateway.middleware import Probes, ShapeLimit
from inference.gateway.protocol import LimitedProtocol
from inference.workers.completion import ModelCard

logger = logging.getLogger(__name__)

BACKLOG = 2048  # hundreds of streams may be opened at once


class HttpFront:
    """The HTTP port of a process; a `Front`."""

    def __init__(self, gateway: Gateway, server: ServerConfig) -> None:
        self._gateway = gateway
        self._config = server
        max_bytes = gateway.config.max_body_bytes
        app = ShapeLimit(create_app(gateway), max_bytes=max_bytes, max_ids=lambda: gateway.card.max_length)
        self._probes = Probes(app, lambda: gateway.is_healthy())

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        host = self._config.host
        listener = _listener(host, self._gateway.config.port)
        self._server = _Server(_uvicorn_config(self._probes, self._config))
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        await self._server.ready.wait()
        logger.info("HTTP on http://%s", address(host, listener.getsockname()[1]))

    def show(self, card: ModelCard) -> None:
        """Another model is served from now on."""
        self._gateway.card = card.named(self._gateway.config.served_model_name)

    def report(self, *, ready: bool, alive: bool = True) -> None:
        """See `Front`."""
        self._probes.is_ready, self._probes.is_alive = ready, alive

    async def refuse_new(self) -> None:
        """Stop listening; requests that run go on."""
        self._server.should_exit = True

    async def close(self) -> None:
        """Let running requests end within the grace."""
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)


class _Server(uvicorn.Server):
    """uvicorn's, as a part of a process that handles its own signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to whoever runs the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and say when it is done."""
        await super().startup(sockets)
        self.ready.set()


def _uvicorn_config(app: ASGIApp, server: ServerConfig) -> uvicorn.Config:
    protocol = type("Protocol", (LimitedProtocol,), {"stall_timeout_s": server.stall_timeout_s})
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        access_log=False,  # a line per request costs more than a token; /metrics counts them
        log_config=None,
        log_level="warning",
        timeout_keep_alive=75,  # longer than the pools of usual clients keep a connection: they close it, not we
        timeout_graceful_shutdown=max(1, math.ceil(server.grace_s) + 1),
        backlog=BACKLOG,
        server_header=False,
    )


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(f"cannot listen on {address(host, port)}: {exc.strerror or exc}") from exc
    return listener
