"""Life cycle of a gateway: OpenAI's HTTP API in front of a remote GenerationService."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from signal import Signals

from specdec.grpc_comm.secured import Headers
from specdec.inference.config import ConnectionConfig, HttpConfig, ObserveConfig, ServerConfig
from specdec.inference.errors import HandshakeError, SpecDecError, UnavailableError
from specdec.inference.gateway.app import Gateway
from specdec.inference.observe.metrics import Metrics
from specdec.inference.serving.fronts import Ports
from specdec.inference.serving.host import Front, Host, opened
from specdec.inference.serving.observers import Observers, observed
from specdec.inference.serving.signals import stop_signal
from specdec.inference.workers.calls.fleet import Fleet, connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.remote import CARD_TIMEOUT_S

logger = logging.getLogger(__name__)

ATTEMPT_S, RETRY_S = 10.0, 1.0
"""Seconds that one attempt at start dials, and seconds until the next attempt, which looks names up again."""


async def serve_gateway(
    connection: ConnectionConfig, http: HttpConfig, server: ServerConfig, observe: ObserveConfig
) -> None:
    """Serve until a signal. The port for probes opens at once, all others when a server has answered.

    Raises:
        ConfigError: the port is taken.
        UnavailableError: no upstream server answers.
    """
    ports = Ports(server, observe)
    fleet: Fleet | None = None

    async def is_serving() -> bool:
        return fleet is not None and await fleet.is_serving()

    async with AsyncExitStack() as stack:
        observers = stack.enter_context(observed(observe))
        for front in (probes := ports.probe_fronts(is_serving)):
            await stack.enter_async_context(opened(front))
        stopped = asyncio.create_task(
            stop_signal()
        )  # a container's first process ignores signals that no handler waits for
        stack.callback(stopped.cancel)
        fleet = await _reached(connection, observers.headers, stack, stopped)
        if fleet is not None:
            await _serve(fleet, connection, http, ports, observers, probes, stopped)


async def _reached(
    connection: ConnectionConfig, headers: Headers, stack: AsyncExitStack, stopped: asyncio.Task[Signals]
) -> Fleet | None:
    """Open a connection's fleet, and return it once a server answers; return None if a signal comes first."""
    dialling = asyncio.create_task(_dialled(connection, headers, stack))
    stopped.add_done_callback(lambda _: dialling.cancel())
    try:
        return await dialling
    except asyncio.CancelledError:
        if not stopped.done() or stopped.cancelled():
            raise
        return None


async def _dialled(connection: ConnectionConfig, headers: Headers, stack: AsyncExitStack) -> Fleet:
    """Dial until a server answers: before a server starts, its name may be unknown or lead to another server.

    Raises:
        UnavailableError: no server answers within the connection's timeout, or the one that does is not trusted.
    """
    loop, complaint = asyncio.get_running_loop(), ""
    ends_at = loop.time() + connection.connect_timeout_s
    while True:
        attempt = replace(connection, connect_timeout_s=min(ATTEMPT_S, max(RETRY_S, ends_at - loop.time())))
        try:
            return await stack.enter_async_context(connected(attempt, headers))
        except UnavailableError as exc:
            if isinstance(exc, HandshakeError) or loop.time() + RETRY_S > ends_at:
                raise
            if str(exc) != complaint:
                logger.warning("not ready, dialling until a server answers: %s", exc)
            complaint = str(exc)
        await asyncio.sleep(RETRY_S)


async def _serve(
    fleet: Fleet,
    connection: ConnectionConfig,
    http: HttpConfig,
    ports: Ports,
    observers: Observers,
    probes: Sequence[Front],
    stopped: asyncio.Task[Signals],
) -> None:
    """Serve OpenAI's API over a fleet of which a server has answered, until `stopped` is done."""
    remote = FailoverCompleter(fleet, connection)
    card = (await remote.model(timeout_s=CARD_TIMEOUT_S)).named(http.served_model_name)
    metrics = Metrics(card.name, role="gateway")
    completer = observers.around(remote, metrics, model=card.name)
    metrics.watch(completer)
    metrics.watch_upstream(lambda: fleet.replicas)
    ports.show_security(metrics)
    gateway = Gateway(completer, card, metrics, fleet.is_serving, http, observers.spans, remote)
    following = asyncio.create_task(_follow_model(gateway, remote, fleet))
    try:
        fronts = [*probes, ports.http_front(gateway)]
        await Host(completer, fronts, config=ports.server, metrics=metrics).run(until=stopped)
    finally:
        following.cancel()


async def _follow_model(gateway: Gateway, remote: FailoverCompleter, fleet: Fleet) -> None:
    """Ask for the model whenever an upstream server reports that it serves: its model may have changed."""
    async with aclosing(fleet.serves()) as changes:
        async for serves in changes:
            if serves:
                try:
                    card = await remote.model(timeout_s=CARD_TIMEOUT_S)
                    gateway.card = card.named(gateway.config.served_model_name)
                except SpecDecError:  # it left or was busy, and may serve another model
                    fleet.look_again()
