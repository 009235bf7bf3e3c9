"""Role gateway: serves OpenAI's HTTP API in front of any server of this project."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.inference.config import ConnectionConfig, HttpConfig, ObserveConfig, ServerConfig
from specdec.inference.settings import group

OF_GRPC = ("port", "max_waiting", "drain", "tls_client_ca", "mtls_port")
OF_MODELS = ("lookup", "drafting", "prompt_share", "idle_timeout_s", "max_worker_slots", "pass_timeout_s")
"""Flags of `ServerConfig` that a gateway lacks."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of --role gateway."""

    connection: ConnectionConfig = group(ConnectionConfig)
    http: HttpConfig = group(HttpConfig, port=8000)
    server: ServerConfig = group(ServerConfig, without=(*OF_GRPC, *OF_MODELS))
    observe: ObserveConfig = group(ObserveConfig, role="gateway", without=("metrics_port", "trace"))


async def run(settings: GatewaySettings) -> int:
    http = replace(settings.http, deadline_s=settings.connection.deadline_s)
    server = replace(settings.server, port=http.port)

    from specdec.inference.serving.gateway import serve_gateway

    await serve_gateway(settings.connection, http, server, settings.observe)
    return 0
