"""HTTP port of the gateway's application."""

from __future__ import annotations

import logging

from grpc_comm.tls import ServerTls
from inference.config import ServerConfig, is_loopback
from inference.gateway.app import Gateway, create_app
from inference.gateway.port import HttpPort, Probes
from inference.workers.calls.access import Access
from inference.workers.completion import ModelCard

logger = logging.getLogger(__name__)

ANY_HOST = ("0.0.0.0", "::", "[::]")
"""Addresses that listen on all of this machine's."""


class HttpFront(HttpPort):
    """HTTP port of the application; a `Front`."""

    def __init__(
        self, gateway: Gateway, server: ServerConfig, tls: ServerTls | None = None, access: Access | None = None
    ) -> None:
        self._gateway = gateway
        probes = Probes(create_app(gateway, access), lambda: gateway.is_healthy())
        super().__init__("HTTP", probes, gateway.config.port, server, tls)

    async def open(self) -> None:
        """See `Front`. The log names the page, and a command to try the server with."""
        await super().open()
        server = self._server_config
        url = self._url("localhost" if is_loopback(server.host) or server.host in ANY_HOST else server.host)
        if not self._gateway.config.no_page:
            logger.info("a page to try it: %s/", url)
        keys = ["-H 'Authorization: Bearer TOKEN'"] if server.security.auth_file else []
        keys += ["--cacert CA"] if self._tls is not None else []
        body = '{"prompt": "Once upon a time", "max_tokens": 40}'
        logger.info(
            "a command to try it: curl %s",
            " ".join([f"{url}/v1/completions -H 'Content-Type: application/json'", *keys, f"-d '{body}'"]),
        )

    def show(self, card: ModelCard) -> None:
        """Present another model as the served one."""
        self._gateway.card = card.named(self._gateway.config.served_model_name)
