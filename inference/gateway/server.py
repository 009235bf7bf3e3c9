"""The application's port."""

from __future__ import annotations

from grpc_comm.tls import ServerTls
from inference.config import ServerConfig
from inference.gateway.app import Gateway, create_app
from inference.gateway.middleware import ShapeLimit
from inference.gateway.port import HttpPort
from inference.gateway.probes import Probes


class HttpFront(HttpPort):
    """The HTTP port of a process; a `Front`."""

    def __init__(self, gateway: Gateway, server: ServerConfig, tls: ServerTls | None = None) -> None:
        self._gateway = gateway
        max_bytes = gateway.config.max_body_bytes
        app = ShapeLimit(create_app(gateway), max_bytes=max_bytes, max_ids=lambda: gateway.card.max_length)
        super().__init__("HTTP", Probes(app, lambda: gateway.is_healthy()), gateway.config.port, server, tls)
