"""What a gRPC server offers beside gRPC if its flags ask for it: metrics on one port, HTTP on another."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from inference.config import ServerConfig
from inference.observe.metrics import Metrics, metrics_server
from inference.workers.generation import GenerationServicer

if TYPE_CHECKING:
    from inference.observe.spans import Telemetry


class HttpServer(Protocol):
    """A running HTTP server."""

    def refuse_new(self) -> None:
        """Stop listening; requests that run go on."""


@asynccontextmanager
async def beside_grpc(
    args: argparse.Namespace,
    service: GenerationServicer,
    metrics: Metrics,
    server: ServerConfig,
    telemetry: Telemetry | None,
) -> AsyncGenerator[HttpServer | None, None]:
    """Serve metrics (--metrics_port) and HTTP (--http_port) while the block runs, each only if it is asked for."""
    with metrics_server(metrics, server.host, args.metrics_port):
        if getattr(args, "http_port", None) is None:
            yield None
            return
        from inference.cli.gateway import local_http_server  # FastAPI takes a third of a second to import

        async with local_http_server(args, service, metrics, server, telemetry) as http:
            yield http
