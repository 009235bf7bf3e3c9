"""Connected clients, one for each contender (a way to serve), with a check that prompts fit into its context."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeAlias

from specdec.comparison.plan.config import ComparisonConfig, Contender
from specdec.comparison.plan.datasets import Prompt
from specdec.comparison.run.client import Client
from specdec.comparison.run.grpc_client import grpc_client
from specdec.inference.config import PLAIN
from specdec.inference.errors import ConfigError
from specdec.inference.text.chat import Chat

Clients: TypeAlias = dict[Contender, Client]

NUM_SPECIAL = 16
"""Most special tokens that a server may add to a text; the text itself has at most as many tokens as bytes."""


@asynccontextmanager
async def connected(config: ComparisonConfig, address: Callable[[Contender], str]) -> AsyncGenerator[Clients, None]:
    """Yield a connected client of each contender (a way to serve), until the block is left.

    Args:
        address: function that returns HOST:PORT of the server of a contender that is no endpoint.

    Raises:
        ConfigError: a file with certificates or a token cannot be used, or a prompt is too long for a server.
        UnavailableError: a server cannot be reached.
    """
    async with AsyncExitStack() as stack:
        clients: Clients = {}
        for contender in config.contenders:
            clients[contender] = await stack.enter_async_context(_client(config, address, contender))
            await _check_lengths(config, contender, clients[contender])
        yield clients


def _client(
    config: ComparisonConfig, address: Callable[[Contender], str], contender: Contender
) -> AbstractAsyncContextManager[Client]:
    endpoint = next((endpoint for endpoint in config.endpoints if endpoint.name == contender.endpoint), None)
    if endpoint is None:
        return grpc_client(address(contender), PLAIN, config.workload, contender)
    if endpoint.is_grpc:
        return grpc_client(endpoint.address, endpoint.security, config.workload, contender)
    from specdec.comparison.run.http_client import http_client  # its packages belong to an extra

    return http_client(endpoint, config.workload)


async def _check_lengths(config: ComparisonConfig, contender: Contender, client: Client) -> None:
    """Raise ConfigError if a prompt and its answer exceed the limit of tokens that a server reports, if it reports one.

    Args:
        contender: way to serve, for the message.
        client: client of the server.
    """
    limit, max_new_tokens = await client.context(), config.workload.max_new_tokens
    if limit is None:
        return
    for prompt_set in config.workload.prompt_sets:
        for number, prompt in enumerate(prompt_set.prompts, start=1):
            num_tokens = await _length(client, prompt, max_new_tokens, limit)
            if num_tokens > limit:
                raise ConfigError(
                    f"{prompt_set.kind} prompt {number} and what is answered may have {num_tokens} tokens, the context "
                    f"of {contender.label} has {limit}: shorten the one, or lower max_new_tokens {max_new_tokens}"
                )


async def _length(client: Client, prompt: Prompt, max_new_tokens: int, limit: int) -> int:
    """Return the most tokens that a prompt and its answers may have together, as the server counts the prompt.

    The result is 0 if a text has so few bytes that it fits into `limit` tokens however it is counted. A prompt that the
    server does not count is taken to have 0 tokens.

    Args:
        max_new_tokens: most tokens of one answer; a conversation has an answer to each of the user's messages.
    """
    if isinstance(prompt, str):
        if len(prompt.encode()) + NUM_SPECIAL + max_new_tokens <= limit:
            return 0
        return (await client.count(prompt) or 0) + max_new_tokens
    asked = Chat.of(*(("user", turn) for turn in prompt.turns))
    return (await client.count(asked) or 0) + len(prompt.turns) * max_new_tokens
