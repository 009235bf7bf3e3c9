"""HTTP port of the gateway's application."""

from __future__ import annotations

from grpc_comm.tls import ServerTls
from inference.config import ServerConfig
from inference.gateway.app import Gateway, create_app
from inference.gateway.port import HttpPort, Probes
from inference.workers.access import Access
from inference.workers.completion import ModelCard


class HttpFront(HttpPort):
    """HTTP port of the application; a `Front`."""

    def __init__(
        self, gateway: Gateway, server: ServerConfig, tls: ServerTls | None = None, access: Access | None = None
    ) -> None:
        self._gateway = gateway
        probes = Probes(create_app(gateway, access), lambda: gateway.is_healthy())
        super().__init__("HTTP", probes, gateway.config.port, server, tls)

    def show(self, card: ModelCard) -> None:
        """Present another model as the served one."""
        self._gateway.card = card.named(self._gateway.config.served_model_name)
