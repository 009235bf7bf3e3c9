"""Where the servers of a name are: HOST:PORT as it stands, and dns:///NAME:PORT as often as it may have changed.

Not gRPC's own resolver: it asks again only when a connection has been lost, so that a server that joins is not found
while the others are well, and it tells nobody which servers there are.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Sequence
from typing import TypeAlias

from grpc_comm.channel import UnreachableError

logger = logging.getLogger(__name__)

Addresses: TypeAlias = dict[str, str | None]
"""HOST:PORT of servers, each with the name that led there; None: the address is how the server is called."""
DNS = "dns:///"
RESOLVE_S = 30.0
"""Between two looks at a name."""


async def addresses_of(targets: Sequence[str]) -> AsyncGenerator[Addresses, None]:
    """All servers, now and whenever that changes; ends if it never can.

    Raises:
        UnreachableError: nobody has heard of a name. Later on, its servers are kept as they were.
    """
    told = await _found(targets)
    yield told
    while any(target.startswith(DNS) for target in targets):
        await asyncio.sleep(RESOLVE_S)
        try:
            found = await _found(targets)
        except UnreachableError as exc:
            logger.warning("the servers are kept as they were: %s", exc)
            continue
        if found != told:
            logger.info("the servers are now %s", ", ".join(found))
            told = found
            yield told


async def _found(targets: Sequence[str]) -> Addresses:
    return {address: name for target in targets for address, name in (await _addresses(target)).items()}


async def _addresses(target: str) -> Addresses:
    if not target.startswith(DNS):
        return {target: None}
    host, _, port = target.removeprefix(DNS).rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        raise UnreachableError(f"{target}: the host is not known ({exc.strerror})") from exc
    return {written(str(where[0]), int(where[1])): host for *_, where in sorted(found)}


def written(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
