"""A server inside the test's process that really listens on all of its ports; by default scripted, without a model."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import httpx

from specdec.grpc_comm.call import Call
from specdec.grpc_comm.server import Server, Servicer
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.config import HttpConfig, ObserveConfig, PortSecurity, ServerConfig
from specdec.inference.observe.metrics import Metrics
from specdec.inference.serving.fronts import Ports
from specdec.inference.serving.host import opened
from specdec.inference.serving.observers import Observers
from specdec.inference.serving.processes import free_port
from specdec.inference.workers.calls.observer import Observer
from specdec.inference.workers.calls.scope import SupervisedCompleter
from specdec.inference.workers.calls.status import to_status
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completion import Completer
from tests.support.certificates import Pki
from tests.support.completers import CARD, ScriptedCompleter


@asynccontextmanager
async def listening(
    *servicers: Servicer, address: str = "127.0.0.1:0", **settings: Any
) -> AsyncGenerator[Server, None]:
    """Serve the given gRPC services at `address` until the block ends; yield the server.

    `settings` are further arguments of `Server`.
    """
    server = Server(address, servicers, **{"status_of": to_status, **settings})
    await server.open()
    try:
        yield server
    finally:
        await server.close()


class YesMan(rpc.VerificationServiceServicer):  # type: ignore[misc]
    """VerificationService (what draft workers call) that answers every draft worker as if it were accepted."""

    service_name = "specdec.v1.VerificationService"
    max_request_bytes = 1000

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_VerificationServiceServicer_to_server(self, server)

    async def Assist(self, _: object, call: Call) -> None:
        await call.write(pb.AssistResponse())


def entry(name: str, role: str, more: str = "") -> str:
    """Return the entry, in TOML, of an auth file for the caller `name` with this role; `more` has further lines."""
    digest = hashlib.sha256(f"token of {name}".replace(" ", "-").encode()).hexdigest()
    return f'[[token]]\nname = "{name}"\nsha256 = "{digest}"\nroles = ["{role}"]\n{more}\n'


def token_of(name: str) -> str:
    """Return the access token of the caller `name`; what `entry` returns for the caller has its hash."""
    return f"token-of-{name}"


@dataclass(frozen=True)
class Served:
    """Numbers of a test server's ports, by what each port serves; `mtls` is the port for client certificates."""

    grpc: int
    http: int
    metrics: int
    probes: int
    mtls: int


@asynccontextmanager
async def served(
    security: PortSecurity,
    completer: Completer | None = None,
    verification: Servicer | None = None,
    *,
    host: str = "127.0.0.1",
) -> AsyncGenerator[Served, None]:
    """Run a server with all of its ports until the block is left; yield the port numbers.

    Args:
        completer: what answers requests; None takes scripted answers.
        verification: service for draft workers; None accepts every worker.
    """
    at = Served(free_port(), free_port(), free_port(), free_port(), free_port())
    if security.client_ca is not None:
        security = replace(security, mtls_port=at.mtls)
    server = ServerConfig(host, port=at.grpc, probe_port=at.probes, security=security, grace_s=0.1)
    observe, metrics = ObserveConfig("target", metrics_port=at.metrics), Metrics("tiny")
    observed = SupervisedCompleter(completer or ScriptedCompleter([["a", "b"]]), Observer(metrics))
    ports = Ports(server, observe, HttpConfig(at.http))
    servicers: list[Servicer] = [GenerationServicer(observed, CARD), verification or YesMan()]
    async with AsyncExitStack() as stack:
        for front in ports.fronts(Observers(observe, None, None), metrics, servicers):
            await stack.enter_async_context(opened(front))
        yield at


def https(trust: Pki) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=ssl.create_default_context(cafile=trust.ca))
