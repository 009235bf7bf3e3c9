"""The ports of a server: gRPC, HTTP, metrics. Each is a `Front` of a `Host`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from grpc_comm.interceptors import StallInterceptor
from grpc_comm.moving import MoveInterceptor
from grpc_comm.server import PortTakenError, Server, Servicer
from inference.config import HttpConfig, ObserveConfig, ServerConfig, address
from inference.errors import ConfigError
from inference.observe.metrics import Metrics, MetricsServer
from inference.serving.observers import Observers
from inference.workers.generation import GenerationServicer
from inference.workers.status import to_status

if TYPE_CHECKING:
    from inference.gateway.server import HttpFront

logger = logging.getLogger(__name__)

MOVE_AFTER_S = 1.0
"""What ends within so long of a drain is not worth reading its prompt anew elsewhere."""


class GrpcFront(Server):
    """A gRPC server that says in the log where it serves."""

    def __init__(
        self,
        config: ServerConfig,
        servicers: Sequence[Servicer],
        observers: Observers,
        *,
        upstream: AsyncGenerator[bool, None] | None = None,
    ) -> None:
        self._host = config.host
        self._moving = MoveInterceptor()
        self._moves = config.drain == "move"
        where = address(config.host, config.port)
        inner = [*observers.interceptors(), self._moving, StallInterceptor(config.stall_timeout_s)]
        try:
            super().__init__(where, servicers, status_of=to_status, inner=inner, upstream=upstream)
        except PortTakenError as exc:
            raise ConfigError(str(exc)) from exc

    async def open(self) -> None:
        """See `Front`."""
        await super().open()
        logger.info("serving on %s", address(self._host, self.port))

    async def refuse_new(self) -> None:
        """See `Front`. Requests that can go on elsewhere do, unless they end in a moment."""
        await super().refuse_new()
        if self._moves:
            asyncio.get_running_loop().call_later(MOVE_AFTER_S, self._moving.move)


def check_ports(server: ServerConfig, observe: ObserveConfig, http: HttpConfig | None = None) -> None:
    """Refuse ports that cannot be listened on, before a model is loaded for minutes.

    Raises:
        ConfigError: naming the address, and why.
    """
    ports = [server.port, observe.metrics_port, None if http is None else http.port]
    with ExitStack() as stack:  # all held until the last is tried, so that none is named twice
        for port in ports:
            if port:
                stack.enter_context(_listening(server.host, port))


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {address(host, port)}: {exc.strerror}") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen()
    except OSError as exc:
        listener.close()
        raise ConfigError(f"cannot listen on {address(host, port)}: {exc.strerror}") from exc
    return listener


def metrics_fronts(observers: Observers, metrics: Metrics, server: ServerConfig) -> list[MetricsServer]:
    """A port for Prometheus, if one is asked for."""
    port = observers.config.metrics_port
    return [] if port is None else [MetricsServer(metrics, server.host, port)]


def http_fronts(
    config: HttpConfig | None,
    service: GenerationServicer,
    metrics: Metrics,
    server: ServerConfig,
    observers: Observers,
    is_healthy: Callable[[], Awaitable[bool]] | None = None,
) -> list[HttpFront]:
    """OpenAI's API in front of a service of this process, if it is asked for."""
    if config is None:
        return []
    from inference.gateway.app import Gateway  # FastAPI takes a third of a second to import
    from inference.gateway.server import HttpFront

    card = service.card.named(config.served_model_name)
    gateway = Gateway(service.completer, card, metrics, is_healthy or _always, config, observers.spans, service.codec)
    return [HttpFront(gateway, server)]


async def _always() -> bool:
    return True
