"""A client for everything that is compared."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeAlias

from inference.comparison.plan.config import ComparisonConfig, Contender
from inference.comparison.run.client import Client
from inference.comparison.run.grpc_client import grpc_client
from inference.config import PLAIN

Clients: TypeAlias = dict[Contender, Client]


@asynccontextmanager
async def connected(config: ComparisonConfig, address: Callable[[Contender], str]) -> AsyncGenerator[Clients, None]:
    """Clients that are connected, until the block is left.

    Args:
        address: of a server that the comparison has started.

    Raises:
        ConfigError: a file of certificates, or with a token, cannot be used.
        UnavailableError: a server cannot be reached.
    """
    async with AsyncExitStack() as stack:
        clients: Clients = {}
        for contender in config.contenders:
            clients[contender] = await stack.enter_async_context(_client(config, address, contender))
        yield clients


def _client(
    config: ComparisonConfig, address: Callable[[Contender], str], contender: Contender
) -> AbstractAsyncContextManager[Client]:
    endpoint = next((endpoint for endpoint in config.endpoints if endpoint.name == contender.endpoint), None)
    if endpoint is None:
        return grpc_client(address(contender), PLAIN, config.workload, contender)
    if endpoint.is_grpc:
        return grpc_client(endpoint.address, endpoint.security, config.workload, contender)
    from inference.comparison.run.http_client import http_client  # its packages are of an extra

    return http_client(endpoint, config.workload)
