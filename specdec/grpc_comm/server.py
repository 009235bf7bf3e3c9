"""gRPC server with the parts that operators expect: health, reflection, error mapping, a graceful stop."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Sequence
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec.grpc_comm.guard import OPEN, Gate, Guard, StatusOf
from specdec.grpc_comm.health import LIVENESS, NOT_SERVING, READINESS, SERVING, HealthServicer
from specdec.grpc_comm.names import written
from specdec.grpc_comm.options import server_options

logger = logging.getLogger(__name__)

_HEALTH_SERVICE = "grpc.health.v1.Health"
CLOSE_GRACE_S = 1.0
"""Seconds that a closing server waits for running streams, so that messages on their way arrive."""
BACKLOG = 2048  # hundreds of streams may be opened at once


class PortTakenError(Exception):
    """Failure to listen on an address, because another process does or the address is not this machine's."""


def listener(host: str, port: int) -> socket.socket:
    """Return a listening socket for servers other than gRPC's; port 0 takes a free one.

    The socket knows its protocol, since otherwise asyncio does not recognise TCP and leaves Nagle's delay on.

    Raises:
        PortTakenError: the address cannot be listened on.
    """
    try:
        family, kind, protocol, _, where = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # IPv4 first
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
    except OSError as exc:
        way_out = "; end what listens there, or take another port" if exc.errno == errno.EADDRINUSE else ""
        raise PortTakenError(f"cannot listen on {written(host, port)}: {exc.strerror or exc}{way_out}") from exc
    return listening


class Servicer(Protocol):
    """Implementation of a gRPC service, which registers itself with a server."""

    @property
    def service_name(self) -> str:
        """Full name, such as specdec.v1.GenerationService."""

    @property
    def max_request_bytes(self) -> int:
        """Return the length in bytes of the longest message that the service's methods accept."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server that has not started."""


class Server:
    """gRPC server with its ports, its services, health and reflection.

    Args:
        address: HOST:PORT; port 0 takes a free one.
        servicers: implementations of the services.
        status_of: function from exceptions of handlers to statuses.
        gate: credentials of the ports, and the checks and limits of each call.

    Raises:
        PortTakenError: the address cannot be listened on.
    """

    def __init__(
        self,
        address: str,
        servicers: Sequence[Servicer],
        *,
        status_of: StatusOf,
        gate: Gate = OPEN,
    ) -> None:
        limits = {servicer.service_name: servicer.max_request_bytes for servicer in servicers}
        self._guard = Guard(status_of, limits, gate)
        options = server_options(max(limits.values(), default=0))
        self._server = grpc.aio.server(interceptors=[self._guard], options=options)
        self._health = HealthServicer()
        self._fit = self._reachable = True
        names = [servicer.service_name for servicer in servicers]
        self._names = [*names, READINESS, ""]  # "" is the server as a whole
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*names, _HEALTH_SERVICE, reflection.SERVICE_NAME], self._server)
        for servicer in servicers:
            servicer.add_to(self._server)
        self.port = self._listen(address, gate.credentials)
        self.mtls_port = None
        if gate.mtls_address is not None:
            self.mtls_port = self._listen(gate.mtls_address, gate.mtls_credentials)

    def _listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as exc:
            raise PortTakenError(f"cannot listen on {address}: the port is taken or the address is not ours") from exc

    async def open(self) -> None:
        """Accept calls; report SERVING."""
        self._health.set(LIVENESS, SERVING)
        self._publish_health()
        await self._server.start()

    def report_upstream(self, serves: bool) -> None:
        """Report NOT_SERVING while `serves` is False, which says that the server that this one needs is down."""
        self._reachable = serves
        self._publish_health()

    def _publish_health(self) -> None:
        for name in self._names:
            self._health.set(name, SERVING if self._fit and self._reachable else NOT_SERVING)

    def report(self, *, ready: bool, alive: bool = True) -> None:
        """Report the server's health; running calls continue.

        Args:
            ready: whether the server accepts requests.
            alive: False if a restart of the process would help.
        """
        self._fit = ready
        self._health.set(LIVENESS, SERVING if alive else NOT_SERVING)
        self._publish_health()

    async def refuse_new(self) -> None:
        """Report NOT_SERVING, so that clients send no further requests; running calls continue."""
        self.report(ready=False)

    def move(self) -> None:
        """End every call, running or new, whose client can continue the request at another server."""
        self._guard.move()

    async def close(self) -> None:
        """Stop the server; streams that still run end after `CLOSE_GRACE_S`."""
        await self._server.stop(CLOSE_GRACE_S)
