"""Ports of a server: gRPC, HTTP, metrics and probes. Each is a `Front`, which a `Host` opens and closes (host.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from specdec.grpc_comm.guard import Gate
from specdec.grpc_comm.server import PortTakenError, Server, Servicer, listener
from specdec.grpc_comm.tls import ServerTls
from specdec.grpc_comm.watched import UnusableError
from specdec.inference.caller import Right
from specdec.inference.config import OPEN, HttpConfig, ObserveConfig, ServerConfig, address, is_loopback
from specdec.inference.errors import ConfigError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.serving.host import Front
from specdec.inference.serving.observers import Observers
from specdec.inference.workers.calls.access import Access
from specdec.inference.workers.calls.admitting import admission
from specdec.inference.workers.calls.status import for_client, to_status
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completion import ModelCard

if TYPE_CHECKING:
    from specdec.inference.gateway.app import HttpFront

logger = logging.getLogger(__name__)

MOVE_AFTER_S = 1.0
"""Seconds of a drain before requests move to another server. In that time some end, and need no second prompt pass."""


async def _always() -> bool:
    return True


POOL = "pool"
"""Role whose server only gives `vllm serve` the use of draft workers, and refuses clients."""


class GrpcFront(Server):
    """gRPC port of a server, opened by its `Host`; a second port, if set, takes calls with client certificates.

    Args:
        answers: True if the server answers requests of clients, so that the log can name a command to try it.
    """

    def __init__(self, config: ServerConfig, servicers: Sequence[Servicer], gate: Gate, *, answers: bool) -> None:
        self._host = config.host
        self._moves = config.drain == "move"
        self._answers_anyone = answers and config.on_loopback and config.security == OPEN
        where = address(config.host, config.port or 0)
        try:
            super().__init__(where, servicers, status_of=lambda error: to_status(for_client(error)), gate=gate)
        except PortTakenError as exc:
            raise ConfigError(str(exc)) from exc

    @property
    def ports(self) -> dict[str, int]:
        """Return the port numbers by name, once the ports are open."""
        return {"grpc": self.port} | ({} if self.mtls_port is None else {"mtls": self.mtls_port})

    async def open(self) -> None:
        """Listen, log where, and report to health checks that requests are accepted."""
        await super().open()
        reach = ", for this machine alone: --host serves others" if is_loopback(self._host) else ""
        logger.info("serving on %s%s", address(self._host, self.port), reach)
        if self._answers_anyone:
            logger.info("a command to try it: specdec fused_client --port %d --prompt TEXT", self.port)
        if self.mtls_port is not None:
            logger.info("serving on %s, with client certificates", address(self._host, self.mtls_port))

    async def refuse_new(self) -> None:
        """Report NOT_SERVING to health checks, which keeps new requests away; running ones continue.

        If `ServerConfig.drain` is "move", requests that their callers can continue at other servers end after
        `MOVE_AFTER_S`.
        """
        await super().refuse_new()
        if self._moves:
            asyncio.get_running_loop().call_later(MOVE_AFTER_S, self.move)


class Ports:
    """Ports of a server, with their certificates and access rights, all checked before models load, which takes long.

    Raises:
        ConfigError: a port cannot be listened on, or a file of certificates or tokens cannot be used.
    """

    def __init__(self, server: ServerConfig, observe: ObserveConfig, http: HttpConfig | None = None) -> None:
        if http is not None:
            import specdec.inference.gateway.app  # noqa: F401 - a missing package is found before a model is loaded
        check_ports(server, observe, http)
        self.server = server
        self._http = http
        self._web: HttpFront | None = None
        self._grpc: GrpcFront | None = None
        self._probes: list[Front] | None = None
        self._tls, self._access = _keys_of(server)

    def fronts(
        self,
        observers: Observers,
        metrics: Metrics,
        servicers: Sequence[Servicer],
        is_healthy: Callable[[], Awaitable[bool]] = _always,
    ) -> list[Front]:
        """Return the ports that the configuration asks for, in the order in which they are to open.

        Args:
            servicers: gRPC services; a `GenerationServicer` among them is served over HTTP too, if configured.
            is_healthy: function that returns whether the servers that this one needs are serving.
        """
        fronts = self.side_fronts(observers, metrics, is_healthy)
        for servicer in servicers:
            if isinstance(servicer, GenerationServicer) and self._http is not None:
                from specdec.inference.gateway.app import Gateway, HttpFront  # FastAPI takes 0.3 s to import

                card, codec = servicer.card.named(self._http.served_model_name), servicer.codec
                completer, spans = servicer.completer, observers.spans
                gateway = Gateway(completer, card, metrics, is_healthy, self._http, spans, codec)
                self._web = HttpFront(gateway, self.server, self._tls, self._access)
                fronts.append(self._web)
        if self.server.port is not None:
            answers = any(isinstance(each, GenerationServicer) for each in servicers) and observers.config.role != POOL
            self._grpc = GrpcFront(self.server, servicers, self._gate(observers), answers=answers)
            fronts.append(self._grpc)
        return fronts

    def side_fronts(
        self, observers: Observers, metrics: Metrics, is_healthy: Callable[[], Awaitable[bool]] = _always
    ) -> list[Front]:
        """Return the ports for Prometheus and for probes, if the configuration asks for them.

        Args:
            is_healthy: function that returns whether the servers that this one needs are serving.
        """
        metrics.watch_security(self._tls, self._access)
        port, probes = observers.config.metrics_port, self.probe_fronts(is_healthy)
        if port is None:
            return [*probes]
        from prometheus_client import make_asgi_app

        from specdec.inference.gateway.door.middleware import HttpGate, RequestId
        from specdec.inference.gateway.door.port import Probes, SidePort  # uvicorn takes a while to import

        scrape = HttpGate(make_asgi_app(metrics.registry), access=self._access, rights=lambda _: frozenset({Right.OPS}))
        return [SidePort("metrics", Probes(RequestId(scrape), is_healthy), port, self.server, self._tls), *probes]

    def probe_fronts(self, is_healthy: Callable[[], Awaitable[bool]]) -> list[Front]:
        """Return a list with the port for probes, empty if the configuration asks for none.

        Each call returns the same port, since it may be open already when the others are made. `is_healthy` returns
        whether the servers that this one needs are serving; that of the first call is used.
        """
        if self._probes is None:
            self._probes = []
            if self.server.probe_port is not None:
                from starlette.responses import Response

                from specdec.inference.gateway.door.port import Probes, SidePort

                probes = Probes(Response(status_code=404), is_healthy)
                self._probes.append(SidePort("probes", probes, self.server.probe_port, self.server, None))
        return self._probes

    def name_of(self, card: ModelCard) -> str:
        """Return the name by which clients know the model of `card`: that of --served_model_name, or else its own."""
        return card.named(None if self._http is None else self._http.served_model_name).name

    def show(self, card: ModelCard) -> None:
        """Let the HTTP port, if there is one, present the model of `card` from now on."""
        if self._web is not None:
            self._web.show(card)

    def report_upstream(self, serves: bool) -> None:
        """Let gRPC health checks report `serves` from now on: whether the servers that this one needs are serving."""
        if self._grpc is not None:
            self._grpc.report_upstream(serves)

    def _gate(self, observers: Observers) -> Gate:
        security, stall_timeout_s = self.server.security, self.server.stall_timeout_s
        gate = Gate(admit=admission(self._access), open_span=observers.open_span, stall_timeout_s=stall_timeout_s)
        if self._tls is None:
            return gate
        gate = replace(gate, credentials=self._tls.grpc_credentials())
        if security.mtls_port is None:
            return gate
        keys = self._tls.grpc_credentials(client_certificates=True)
        return replace(gate, mtls_address=address(self.server.host, security.mtls_port), mtls_credentials=keys)


def _keys_of(server: ServerConfig) -> tuple[ServerTls | None, Access]:
    security = server.security
    try:
        access = Access(security.auth_file, on_loopback=server.on_loopback)
        if security.cert is None or security.key is None:
            return None, access
        return ServerTls(security.cert, security.key, security.client_ca), access
    except UnusableError as exc:
        raise ConfigError(str(exc)) from exc


def check_ports(server: ServerConfig, observe: ObserveConfig, http: HttpConfig | None = None) -> None:
    """Check that the configured ports are free, and that traces of HTTP requests can be made if they are asked for.

    Raises:
        ConfigError: a port cannot be listened on, and the message names its address and the reason; or FastAPI is too
            old to trace HTTP requests.
    """
    if http is not None and observe.otlp_endpoint is not None and find_spec("fastapi.telemetry") is None:
        raise ConfigError(
            f"--otlp_endpoint with --http_port needs a newer FastAPI than {version('fastapi')}, which makes no traces: "
            "leave one of them out, or serve HTTP by `specdec gateway` in an environment of its own"
        )
    ports = [server.port, observe.metrics_port, None if http is None else http.port]
    ports += [server.probe_port, server.security.mtls_port]
    try:
        with ExitStack() as stack:  # hold all until the last is tried: a port named twice must fail
            for port in filter(None, ports):
                stack.enter_context(listener(server.host, port))
    except PortTakenError as exc:
        raise ConfigError(str(exc)) from exc
