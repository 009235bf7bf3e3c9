"""Runs the application on uvicorn inside this process's event loop, beside the gRPC server or alone."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from grpc_comm.options import address
from inference.errors import ConfigError
from inference.gateway.app import Gateway, create_app

logger = logging.getLogger(__name__)

BACKLOG = 2048  # hundreds of streams may be opened at once


class HttpServer(uvicorn.Server):
    """uvicorn's, as a part of a process that handles its own signals."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to whoever runs the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and say when it is done."""
        await super().startup(sockets)
        self.ready.set()

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    def refuse_new(self) -> None:
        """Stop listening; requests that run go on."""
        self.should_exit = True


@asynccontextmanager
async def http_server(gateway: Gateway, host: str, port: int, *, grace_s: float) -> AsyncGenerator[HttpServer, None]:
    """Serve until the block is left; then let running requests end for `grace_s` seconds.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    listener = _listener(host, port)
    config = uvicorn.Config(
        create_app(gateway),
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,  # a line per request costs more than a token; /metrics counts them
        log_config=None,
        log_level="warning",
        timeout_keep_alive=75,  # longer than the pools of usual clients keep a connection: they close it, not we
        timeout_graceful_shutdown=max(1, math.ceil(grace_s) + 1),
        backlog=BACKLOG,
        server_header=False,
    )
    server = HttpServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        await server.ready.wait()
        logger.info("HTTP on http://%s", address(host, listener.getsockname()[1]))
        yield server
    finally:
        server.refuse_new()
        await asyncio.gather(task, return_exceptions=True)


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
