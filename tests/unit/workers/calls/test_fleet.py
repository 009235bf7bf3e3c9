"""Servers behind one name: a new server gets requests, and a server that is taken out finishes its requests first."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from specdec.grpc_comm import health, names, secured
from specdec.grpc_comm.channel import UnreachableError
from specdec.grpc_comm.guard import Gate
from specdec.grpc_comm.names import addresses_of
from specdec.grpc_comm.options import MAX_STREAMS_PER_CONNECTION
from specdec.grpc_comm.server import Server
from specdec.grpc_comm.tls import ServerTls
from specdec.inference.config import ConnectionConfig, DialSecurity
from specdec.inference.workers.calls import fleet as fleet_module
from specdec.inference.workers.calls.fleet import Fleet, connected
from specdec.inference.workers.calls.status import to_status
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.generation import GenerationServicer
from tests.support.certificates import pki
from tests.support.completers import CARD
from tests.support.scripted import until
from tests.unit.workers.completing.test_failover import WHOLE, Counting, Place, answer

NAME = "targets.example"


class Resolver:
    """Stand-in for DNS: `hosts` has the addresses of the host name NAME; None means that the name does not exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.hosts: tuple[str, ...] | None = hosts
        self.num_asked = 0
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._answer)
        monkeypatch.setattr(names, "RESOLVE_S", 0.02)

    async def _answer(self, host: str, port: int, **_: Any) -> list[Any]:
        assert host == NAME
        self.num_asked += 1
        if self.hosts is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        kinds = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in self.hosts]
        return [(kind, 0, 0, "", (each, port)) for kind, each in zip(kinds, self.hosts, strict=True)]

    async def until_asked(self, num_times: int) -> None:
        end = self.num_asked + num_times
        await until(lambda: self.num_asked >= end)


async def test_a_changed_name_is_published_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch, "10.0.0.2", "10.0.0.1")
    told = addresses_of(["c:1", f"dns:///{NAME}:7"])
    assert await anext(told) == {"c:1": None, "10.0.0.1:7": NAME, "10.0.0.2:7": NAME}
    change = asyncio.create_task(anext(told))
    await resolver.until_asked(2)
    resolver.hosts = None
    await resolver.until_asked(2)
    assert not change.done(), "the servers are kept while no name server knows the name"
    resolver.hosts = ("::1",)
    async with asyncio.timeout(60):
        assert await change == {"c:1": None, "[::1]:7": NAME}
    await told.aclose()


async def test_a_client_looks_a_name_up_until_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client looks a host name up until it exists: a pod's name does not exist before the pod has an address."""
    monkeypatch.setattr(fleet_module, "RETRY_S", 0.02)
    resolver = Resolver(monkeypatch)
    resolver.hosts = None
    server = Server("127.0.0.1:0", [], status_of=to_status)
    await server.open()
    link = ConnectionConfig(f"dns:///{NAME}", server.port, 600.0, security=DialSecurity(insecure=True))
    async with AsyncExitStack() as stack:
        dialling = asyncio.create_task(stack.enter_async_context(connected(link)))
        await resolver.until_asked(2)
        assert not dialling.done()
        resolver.hosts = ("127.0.0.1",)
        async with asyncio.timeout(60):
            assert (await dialling).addresses == (f"127.0.0.1:{server.port}",)
    await server.close()


async def test_an_unknown_name_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Resolver(monkeypatch).hosts = None
    with pytest.raises(UnreachableError, match="the host is not known"):
        await anext(addresses_of([f"dns:///{NAME}:7"]))


def is_ready(fleet: Fleet, place: Place) -> bool:
    return place.address in fleet.addresses and fleet.is_ready(fleet._replicas[place.address])


async def test_joining_servers_are_used_leaving_ones_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch, "127.0.0.1")
    old = Place(Counting())
    new = Place(Counting(), "127.0.0.2", old.server.port)
    where = f"dns:///{NAME}:{old.server.port}"
    async with AsyncExitStack() as stack:
        for place in (old, new):
            await place.server.open()
            stack.push_async_callback(place.die)
        fleet = await stack.enter_async_context(Fleet([where]))
        fleet._policy._nearest = lambda addresses, prefix: fleet._policy._least(addresses)  # type: ignore[method-assign]
        completer = FailoverCompleter(fleet, ConnectionConfig(where, 1, security=DialSecurity(insecure=True)))
        await until(lambda: is_ready(fleet, old))
        old.completer.go.clear()
        running = asyncio.create_task(answer(completer))
        await until(lambda: bool(old.completer.asked))

        resolver.hosts = ("127.0.0.1", "127.0.0.2")
        await until(lambda: is_ready(fleet, new))
        assert await answer(completer) == WHOLE
        assert len(new.completer.asked) == 1, "it has nothing to do yet"

        resolver.hosts = ("127.0.0.2",)
        await until(lambda: old.address not in fleet.addresses)
        assert [await answer(completer) for _ in range(3)] == [WHOLE] * 3
        assert (len(old.completer.asked), len(new.completer.asked)) == (1, 4)
        assert not running.done()
        old.completer.go.set()
        assert await running == WHOLE
        assert len(new.completer.asked) == 4, "it has ended where it began"


async def test_a_silent_server_does_not_delay_another() -> None:
    """A server that does not answer does not delay requests to another server.

    Regression: a gateway with a healthy and a lost server waited for the lost one, so its own health probes, which must
    be answered within a second, failed.
    """
    good = Place(Counting())
    await good.server.open()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with Fleet([good.address, f"127.0.0.1:{silent.getsockname()[1]}"]) as fleet:
            await until(lambda: is_ready(fleet, good))
            began = time.monotonic()
            assert await fleet.is_serving()
            assert time.monotonic() - began < health.TIMEOUT_S
            await good.die()
            assert not await fleet.is_serving()


async def test_a_gateway_at_its_stream_limit_is_ready() -> None:
    """A gateway that has as many streams open as its connection allows stays ready.

    Regression: the health check of a busy gateway waited for a free HTTP/2 stream, so the gateway was taken out of
    service.
    """
    busy = Place(Counting())
    await busy.server.open()
    async with Fleet([busy.address]) as fleet:
        await until(lambda: is_ready(fleet, busy))
        busy.completer.go.clear()
        completer = FailoverCompleter(fleet, ConnectionConfig(busy.address, 1))
        running = [asyncio.create_task(answer(completer)) for _ in range(MAX_STREAMS_PER_CONNECTION)]
        await until(lambda: len(busy.completer.asked) == MAX_STREAMS_PER_CONNECTION - 1)  # the watch has one
        assert await fleet.is_serving()
        busy.server.report(ready=False)
        await until(lambda: not is_ready(fleet, busy))
        assert not await fleet.is_serving()
        busy.completer.go.set()
        assert await asyncio.gather(*running) == [WHOLE] * len(running)
        await busy.die()


async def test_a_replaced_certificate_costs_no_request_and_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a client's certificate is replaced, no request is lost, and servers that drain later are still noticed.

    Regression: a replaced certificate closed the old channel with its health watch, so servers that drained later went
    unseen.
    """
    monkeypatch.setattr(secured, "RETIRE_S", 0.1)
    monkeypatch.setattr(health, "WATCH_AGAIN_S", 0.02)
    trust, completer = pki(tmp_path / "ours"), Counting()
    gate = Gate(ServerTls(*trust.pair("server"), trust.ca).grpc_credentials(client_certificates=True))
    server = Server("127.0.0.1:0", [GenerationServicer(completer, CARD)], status_of=to_status, gate=gate)
    await server.open()
    security = DialSecurity(trust.ca, *trust.pair("client", "spiffe://here/one"))
    link = ConnectionConfig("127.0.0.1", server.port, security=security)
    async with Fleet(link.targets, security) as fleet:
        replica = fleet._replicas[f"127.0.0.1:{server.port}"]
        await until(lambda: fleet.is_ready(replica))
        completer.go.clear()
        running = asyncio.create_task(answer(FailoverCompleter(fleet, link)))
        await until(lambda: bool(completer.asked))
        trust.pair("client", "spiffe://here/two")
        assert await fleet.is_serving()
        await until(lambda: len(completer.asked) == 2)
        completer.go.set()
        assert await running == WHOLE
        assert completer.asked[1].resume is not None
        server.report(ready=False)
        await until(lambda: not fleet.is_ready(replica))
    await server.close()


async def test_joining_during_a_write_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may join the list of servers while the file with the client's access token is being written.

    Regression: if a server joined at such a moment, an error ended the task that follows the list.
    """
    monkeypatch.setattr(names, "LOOK_S", 0.02)
    token, listed = tmp_path / "token", tmp_path / "list"
    token.write_text("secret")
    listed.write_text("127.0.0.1:1\n")
    security = DialSecurity(token_file=token, insecure=True)
    async with Fleet([f"file://{listed}"], security) as fleet:
        token.write_text("")
        listed.write_text("127.0.0.1:1\n127.0.0.1:22\n")
        await until(lambda: len(fleet.addresses) == 2)
        token.write_text("another")
        listed.write_text("127.0.0.1:333\n")
        await until(lambda: fleet.addresses == ("127.0.0.1:333",))
