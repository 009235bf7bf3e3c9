"""Addresses of servers, given as HOST:PORT, or looked up at intervals by dns:///NAME:PORT or in file:///PATH.

gRPC's own resolver would not do. It looks names up again only when a connection has been lost, so it does not find a
server that joins while the others are well. And it does not report the addresses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TypeAlias

from specdec.grpc_comm.channel import UnreachableError
from specdec.grpc_comm.tls import split_address
from specdec.grpc_comm.watched import UnusableError, Watched

logger = logging.getLogger(__name__)

Addresses: TypeAlias = dict[str, str | None]
"""Servers by HOST:PORT, each with the DNS name that led to it; None if the address was given, or stood in a file."""
DNS, FILE = "dns:///", "file://"
RESOLVE_S, LOOK_S = 30.0, 0.5
"""Seconds between two lookups of a name, and of a file."""


async def addresses_of(targets: Sequence[str]) -> AsyncGenerator[Addresses, None]:
    """Yield all servers, at first and after every change; end after the first if all targets are HOST:PORT.

    Raises:
        UnreachableError: the first lookup finds a name unknown, or no server in a file. Later lookups that fail change
            nothing.
    """
    sources = [_Source(target) for target in targets]
    published = await _found(sources)
    yield published
    while math.isfinite(every_s := min(source.every_s for source in sources)):
        await asyncio.sleep(every_s)
        try:
            found = await _found(sources)
        except UnreachableError as exc:
            logger.warning("the servers are kept as they were: %s", exc)
            continue
        if found != published:
            logger.info("the servers are now %s", ", ".join(found))
            published = found
            yield published


class _Source:
    """Servers of one target, which is HOST:PORT, a DNS name or a file.

    Attributes:
        every_s: seconds between two lookups; infinite for HOST:PORT.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._file = _list(Path(target.removeprefix(FILE))) if target.startswith(FILE) else None
        self.every_s = LOOK_S if self._file else RESOLVE_S if target.startswith(DNS) else math.inf
        self._due = -math.inf
        self._found: Addresses = {}

    async def addresses(self) -> Addresses:
        """Return the servers that the latest lookup found; look them up again when that is due."""
        if (now := time.monotonic()) >= self._due:
            self._due = now + self.every_s
            self._found = self._file.get() if self._file else await _addresses(self._target)
        return self._found


async def _found(sources: Sequence[_Source]) -> Addresses:
    return {address: name for source in sources for address, name in (await source.addresses()).items()}


def _list(path: Path) -> Watched[Addresses]:
    try:
        return Watched([path], lambda: _listed(path))
    except UnusableError as exc:
        raise UnreachableError(str(exc)) from exc


def _listed(path: Path) -> Addresses:
    """Return the servers in a file with one HOST:PORT per line; empty lines and lines that begin with # are skipped.

    Raises:
        UnusableError: a line is something else, or the file has no line, as while it is being written.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for each in text.splitlines() if (line := each.strip()) and not line.startswith("#")]
    for line in lines:
        host, _, port = line.rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise UnusableError(f"{path}: {line!r} is not HOST:PORT, with a port in 1..65535")
    if not lines:
        raise UnusableError(f"{path} names no server")
    return dict.fromkeys(lines)


async def _addresses(target: str) -> Addresses:
    if not target.startswith(DNS):
        return {target: None}
    host, port = split_address(target.removeprefix(DNS))
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        raise UnreachableError(f"{target}: the host is not known ({exc.strerror})") from exc
    return {written(str(where[0]), int(where[1])): host for *_, where in sorted(found)}


def written(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
