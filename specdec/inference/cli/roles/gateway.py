"""Role gateway: serves OpenAI's HTTP API, and gRPC, in front of any server of this project."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.inference.config import (
    OF_MODELS,
    ConnectionConfig,
    HttpConfig,
    ObserveConfig,
    ServerConfig,
    optional_grpc_port,
)
from specdec.inference.settings import group


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of --role gateway, which serves OpenAI's HTTP API, and gRPC, in front of other servers."""

    connection: ConnectionConfig = group(ConnectionConfig)
    http: HttpConfig = group(HttpConfig, port=8000)
    server: ServerConfig = group(
        ServerConfig, without=("max_waiting", *OF_MODELS), port=optional_grpc_port("serve gRPC clients")
    )
    observe: ObserveConfig = group(ObserveConfig, role="gateway", without=("metrics_port", "trace"))


async def run(settings: GatewaySettings) -> int:
    from specdec.inference.serving.edge import serve_edge

    await serve_edge(settings.connection, settings.server, settings.http, settings.observe)
    return 0
