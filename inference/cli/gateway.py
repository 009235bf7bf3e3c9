"""OpenAI's HTTP API: the gateway role, and the same in front of a completer of this process."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grpc_comm.channel import states
from grpc_comm.options import address
from grpc_comm.server import stop_signal
from inference.cli.generate import connected
from inference.config import ServerConfig
from inference.errors import SpecDecError
from inference.gateway.app import Gateway
from inference.gateway.server import HttpServer, http_server
from inference.observe.metrics import Metrics
from inference.serving.observers import continuing, observed
from inference.workers.completion import Completer, ModelCard
from inference.workers.draining import DrainingCompleter
from inference.workers.generation import GenerationServicer
from inference.workers.remote import RemoteCompleter

if TYPE_CHECKING:
    from inference.observe.spans import Telemetry

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 2.0


async def serve_gateway(args: argparse.Namespace) -> int:
    """Serve HTTP in front of a remote GenerationService, until a signal."""
    server = ServerConfig(args.host, args.http_port, grace_s=args.grace_s)
    with observed(args) as observers:
        async with connected(args) as channel:
            where = address(args.target_host, args.port)
            remote = RemoteCompleter(continuing(channel, observers.telemetry), where, deadline_s=args.deadline_s)
            card = _named(args, ModelCard.from_message(await remote.model()))
            metrics = Metrics(card.name)
            draining = DrainingCompleter(remote)
            completer = observers.around(draining, metrics, model=card.name)
            metrics.watch(completer)
            gateway = _gateway(args, completer, card, metrics, lambda: _is_serving(channel), observers.telemetry)
            async with http_server(gateway, server.host, server.port, grace_s=server.grace_s) as http:
                following = asyncio.create_task(_follow_model(gateway, remote, channel, args))
                signal = await stop_signal()
                following.cancel()
                logger.info("%s: running requests get %g s", signal.name, server.grace_s)
                http.refuse_new()
                asyncio.get_running_loop().call_later(server.grace_s, draining.end)
    logger.info("stopped")
    return 0


def local_http_server(
    args: argparse.Namespace,
    service: GenerationServicer,
    metrics: Metrics,
    server: ServerConfig,
    telemetry: Telemetry | None,
) -> AbstractAsyncContextManager[HttpServer]:
    """HTTP in front of a completer of this process."""
    gateway = _gateway(args, service.completer, _named(args, service.card), metrics, _always, telemetry)
    return http_server(gateway, server.host, args.http_port, grace_s=server.grace_s)


async def _follow_model(
    gateway: Gateway, remote: RemoteCompleter, channel: grpc.aio.Channel, args: argparse.Namespace
) -> None:
    """Ask for the model whenever the connection is made: a server that comes back may serve another one."""
    async for state in states(channel):
        if state is grpc.ChannelConnectivity.READY:
            with suppress(SpecDecError):  # it left again, and will be asked when it is back
                gateway.card = _named(args, ModelCard.from_message(await remote.model()))


async def _always() -> bool:
    return True


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _named(args: argparse.Namespace, card: ModelCard) -> ModelCard:
    return card if args.served_model_name is None else replace(card, name=args.served_model_name)


def _gateway(
    args: argparse.Namespace,
    completer: Completer,
    card: ModelCard,
    metrics: Metrics,
    is_healthy: Callable[[], Awaitable[bool]],
    telemetry: Telemetry | None,
) -> Gateway:
    return Gateway(
        completer=completer,
        card=card,
        metrics=metrics,
        is_healthy=is_healthy,
        per_token=args.stream_chunk == "token",
        deadline_s=getattr(args, "deadline_s", 600.0),
        max_body_bytes=round(args.max_body_mib * 2**20),
        page=not args.no_page,
        telemetry=telemetry,
    )
