"""A gateway follows the deadlines, models and readiness of the servers behind it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.server import Server
from specdec.inference.config import ConnectionConfig, DialSecurity, HttpConfig, ObserveConfig, ServerConfig
from specdec.inference.errors import DeadlineError
from specdec.inference.gateway.app import create_app
from specdec.inference.observe.metrics import Metrics
from specdec.inference.serving import gateway as gateway_module
from specdec.inference.serving.gateway import _dialled, _follow_model, serve_gateway
from specdec.inference.serving.processes import free_port
from specdec.inference.workers.calls import fleet as fleet_module
from specdec.inference.workers.calls.convert import card_to_message
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.calls.observer import Observer
from specdec.inference.workers.calls.scope import SupervisedCompleter
from specdec.inference.workers.calls.status import to_status
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import ModelCard
from tests.support.completers import CARD, ScriptedCompleter, gateway
from tests.support.ports import listening
from tests.unit.workers.calls.test_fleet import NAME, Resolver

OTHER = replace(CARD, name="other", max_length=64)
BUSY = replace(CARD, name="busy")


async def test_a_deadline_is_one_on_both_sides() -> None:
    """Gateway and server both count a request that exceeds its deadline as DEADLINE_EXCEEDED.

    Regression: gateway and server counted a request over its deadline as CANCELLED, as if the client had
    left.
    """
    metrics = Metrics("tiny")
    hanging = SupervisedCompleter(ScriptedCompleter([["a"]], gap_s=30.0), Observer(metrics))
    async with (
        listening(GenerationServicer(hanging, CARD)) as server,
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        front = gateway(RemoteCompleter(channel, "behind", deadline_s=10.0), deadline_s=1.0)
        transport = httpx.ASGITransport(create_app(front))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            late = await client.post("/v1/completions", json={"prompt": "x", "n": 2})
            counted = (await client.get("/metrics")).text
    assert (late.status_code, late.json()["error"]["message"]) == (504, "the request is not finished after 1 s")
    line = 'specdec_request_failures_total{code="DEADLINE_EXCEEDED",model_name="tiny"} 2.0'
    assert line in counted
    assert line in metrics.exposition().decode()


class Busy(GenerationServicer):
    """Servicer that describes its next model only in its second answer to GetModel."""

    async def GetModel(self, request: Any, context: Any) -> Any:
        card, self.card = self.card, OTHER
        if card is BUSY:
            raise DeadlineError("busy")
        return card_to_message(card)


async def started(card: ModelCard, port: int = 0) -> Server:
    servicer = (Busy if card is BUSY else GenerationServicer)(ScriptedCompleter([]), card)
    server = Server(f"127.0.0.1:{port}", [servicer], status_of=to_status)
    await server.open()
    return server


@pytest.mark.parametrize("next_one", [OTHER, BUSY])
async def test_a_replaced_model_is_listed(monkeypatch: pytest.MonkeyPatch, next_one: ModelCard) -> None:
    """A gateway lists the model that its server has now.

    Regression: a gateway asked for the model's name once, and refused the new name after a change.
    """
    monkeypatch.setattr(fleet_module, "LOOK_AGAIN_S", 0.05)
    server = await started(CARD)
    front = gateway(ScriptedCompleter([]))
    connection = ConnectionConfig("127.0.0.1", server.port, 60.0)
    async with connected(connection) as fleet:
        following = asyncio.create_task(_follow_model(front, FailoverCompleter(fleet, connection), fleet))
        await server.close()
        server = await started(next_one, server.port)
        async with asyncio.timeout(60):
            while True:
                if front.card == OTHER:
                    break
                await asyncio.sleep(0.02)
        following.cancel()
    await server.close()
    transport = httpx.ASGITransport(create_app(front))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("other", 64)
        assert (await client.get("/v1/models/tiny")).status_code == 404


async def test_a_gateway_is_alive_and_as_ready_as_its_servers() -> None:
    """A gateway without a server is alive, waits for one, and is not ready at any of its ports.

    Regression: a gateway ended after --connect_timeout_s, and was restarted for as long as a target loaded;
    without a server it answered 503 at its HTTP port, but 200 at its port for probes.
    """
    port, config = free_port(), ServerConfig(probe_port=free_port(), grace_s=0.0)
    connection = ConnectionConfig("127.0.0.1", free_port(), 600.0)
    serving = asyncio.create_task(serve_gateway(connection, HttpConfig(port), config, ObserveConfig("gateway")))
    async with httpx.AsyncClient() as client, asyncio.timeout(60):

        async def status(path: str, on: int | None = config.probe_port) -> int:
            return (await client.get(f"http://127.0.0.1:{on}{path}")).status_code

        while not await _listens(config.probe_port or 0):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.02)
        assert (await status("/livez"), await status("/readyz"), await _listens(port)) == (200, 503, False)
        server = await started(CARD, connection.port)
        while await status("/readyz") != 200:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.02)
        assert await status("/readyz", port) == 200
        server.report(ready=False)
        assert (await status("/readyz", port), await status("/readyz")) == (503, 503)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await server.close()


async def test_a_gateway_resolves_a_name_until_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway resolves a name again and again until it exists, since a pod's name needs the pod's address."""
    monkeypatch.setattr(gateway_module, "RETRY_S", 0.02)
    resolver = Resolver(monkeypatch)
    resolver.hosts = None
    server = await started(CARD)
    connection = ConnectionConfig(f"dns:///{NAME}", server.port, 600.0, security=DialSecurity(insecure=True))
    async with AsyncExitStack() as stack:
        dialling = asyncio.create_task(_dialled(connection, dict, stack))
        await resolver.until_asked(2)
        assert not dialling.done()
        resolver.hosts = ("127.0.0.1",)
        async with asyncio.timeout(60):
            assert (await dialling).addresses == (f"127.0.0.1:{server.port}",)
    await server.close()


async def test_a_gateway_that_waits_ends_at_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that waits for its first server ends at a signal.

    The first process of a container ignores signals without a handler, and would be killed only after 90 s.
    """
    asked = asyncio.Event()
    monkeypatch.setattr(gateway_module, "stop_signal", asked.wait)
    connection = ConnectionConfig("127.0.0.1", free_port(), 600.0)
    serving = serve_gateway(connection, HttpConfig(free_port()), ServerConfig(), ObserveConfig("gateway"))
    asyncio.get_running_loop().call_later(0.05, asked.set)
    async with asyncio.timeout(60):
        await serving


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
