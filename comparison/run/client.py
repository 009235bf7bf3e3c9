"""Thin clients: they send a prompt, or a conversation turn by turn, and keep what came back or how it failed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from comparison.plan.datasets import Conversation, Prompt
from comparison.run.record import RequestRecord
from inference.text.chat import Chat, ChatMessage

CONNECT_TIMEOUT_S = 10.0

Ask: TypeAlias = Callable[[int, float], Awaitable[list[RequestRecord]]]
"""Completes the prompt of this index, all its turns; times count from the other argument, in monotonic seconds. That a
request failed, its record says."""


class Client(Protocol):
    """Asks one server."""

    async def context(self) -> int | None:
        """Tokens that prompt and answer may have together; None: it does not say. Afterwards there is a connection.

        Raises:
            SpecDecError: it cannot be reached, or does not answer as it should.
        """

    async def count(self, prompt: str | Chat) -> int | None:
        """Tokens of a prompt as the server reads it; None: it does not tell."""

    async def complete(self, prompt: str | Chat, prompt_index: int, sent_s: float) -> RequestRecord:
        """Ask, and time the answer, from `sent_s` on. That it failed, the record says."""


def asking(client: Client, prompts: Sequence[Prompt]) -> Ask:
    """Asks a client for one of these prompts."""
    turns = [len(prompt.turns) if isinstance(prompt, Conversation) else 1 for prompt in prompts]
    firsts = [0, *itertools.accumulate(turns)]
    return lambda index, sent_s: _converse(client, prompts[index], firsts[index], sent_s)


async def _converse(client: Client, prompt: Prompt, first: int, sent_s: float) -> list[RequestRecord]:
    """Ask what a prompt is made of; `first` is the number of its first request."""
    if isinstance(prompt, str):
        return [await client.complete(prompt, first, sent_s)]
    records: list[RequestRecord] = []
    said = [ChatMessage("system", prompt.system)] if prompt.system else []
    for number, turn in enumerate(prompt.turns, start=first):
        said.append(ChatMessage("user", turn))
        began_s = time.monotonic() if records else sent_s
        records.append(await client.complete(Chat(tuple(said)), number, began_s))
        if records[-1].error_code is not None:
            break  # what follows would be another conversation
        said.append(ChatMessage("assistant", records[-1].text))
    return records
