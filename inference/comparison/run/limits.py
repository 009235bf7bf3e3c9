"""Whether every prompt fits into every server's context, before anything is measured."""

from __future__ import annotations

from inference.comparison.plan.config import ComparisonConfig
from inference.comparison.plan.datasets import Prompt
from inference.comparison.run.client import Client
from inference.comparison.run.connections import Clients
from inference.errors import ConfigError
from inference.text.chat import Chat

NUM_SPECIAL = 16
"""Tokens that a server may put around a text; the text itself has no more than it has bytes."""


async def check_lengths(config: ComparisonConfig, clients: Clients) -> None:
    """Ask each server for its context, and how long prompts are for it; one that does not tell is not held to it.

    Raises:
        ConfigError: a prompt and its answer are longer; the message names it, the server and its limit.
    """
    max_new_tokens = config.workload.max_new_tokens
    for contender, client in clients.items():
        limit = (await client.model()).max_length
        for prompt_set in config.workload.prompt_sets if limit is not None else ():
            for number, prompt in enumerate(prompt_set.prompts, start=1):
                num_tokens = await _length(client, prompt, max_new_tokens, limit or 0)
                if num_tokens > (limit or 0):
                    raise ConfigError(
                        f"{prompt_set.kind} prompt {number} and what is answered may have {num_tokens} tokens, the "
                        f"context of {contender.label} has {limit}: shorten the one, or lower max_new_tokens "
                        f"{max_new_tokens}"
                    )


async def _length(client: Client, prompt: Prompt, max_new_tokens: int, limit: int) -> int:
    """Of the last turn, with all answers; as much as is known."""
    if isinstance(prompt, str):
        if len(prompt.encode()) + NUM_SPECIAL + max_new_tokens <= limit:
            return 0
        return (await client.count(prompt) or 0) + max_new_tokens
    asked = Chat.of(*(("user", turn) for turn in prompt.turns))
    return (await client.count(asked) or 0) + len(prompt.turns) * max_new_tokens
