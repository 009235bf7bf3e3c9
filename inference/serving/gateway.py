"""The life of a gateway: OpenAI's HTTP API in front of a remote GenerationService."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from inference.config import ConnectionConfig, HttpConfig, ObserveConfig, ServerConfig
from inference.errors import SpecDecError
from inference.gateway.app import Gateway
from inference.observe.metrics import Metrics
from inference.serving.fronts import Ports
from inference.serving.host import Host
from inference.serving.observers import observed
from inference.workers.failover import FailoverCompleter
from inference.workers.fleet import Fleet, connected
from inference.workers.remote import CARD_TIMEOUT_S


async def serve_gateway(
    connection: ConnectionConfig, http: HttpConfig, server: ServerConfig, observe: ObserveConfig
) -> None:
    """Serve until a signal.

    Raises:
        ConfigError: the port is taken.
        UnavailableError: no server behind it answers.
    """
    ports = Ports(server, observe)
    with observed(observe) as observers:
        async with connected(connection, observers.headers) as fleet:
            remote = FailoverCompleter(fleet, connection)
            card = (await remote.model(timeout_s=CARD_TIMEOUT_S)).named(http.served_model_name)
            metrics = Metrics(card.name, role="gateway")
            completer = observers.around(remote, metrics, model=card.name)
            metrics.watch(completer)
            gateway = Gateway(completer, card, metrics, fleet.is_serving, http, observers.spans, remote)
            following = asyncio.create_task(_follow_model(gateway, remote, fleet))
            try:
                fronts = [*ports.side_fronts(observers, metrics, fleet.is_serving), ports.http_front(gateway)]
                await Host(completer, fronts, config=server, metrics=metrics).run()
            finally:
                following.cancel()


async def _follow_model(gateway: Gateway, remote: FailoverCompleter, fleet: Fleet) -> None:
    """Ask for the model whenever a server behind says that it serves: it, or one behind it, may be another now."""
    async with aclosing(fleet.serves()) as changes:
        async for serves in changes:
            if serves:
                try:
                    card = await remote.model(timeout_s=CARD_TIMEOUT_S)
                    gateway.card = card.named(gateway.config.served_model_name)
                except SpecDecError:  # whether it left again, or was busy: it may be another one
                    fleet.look_again()
