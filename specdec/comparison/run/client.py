"""Thin clients: they send a prompt, or a conversation turn by turn, and keep the answer or the failure."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from specdec.comparison.plan.datasets import Conversation, Prompt
from specdec.comparison.plan.record import RequestRecord
from specdec.inference.text.chat import Chat, ChatMessage

CONNECT_TIMEOUT_S = 10.0

Ask: TypeAlias = Callable[[int, float | None], Awaitable[list[RequestRecord]]]
"""Function of (prompt index, due_s) that sends a prompt, or a conversation's turns, and returns a record of each.

`due_s` is explained at `Client.complete`.
"""


NUM_BEST = 5
"""Most probable tokens per position whose log-probabilities a client asks for; OpenAI's API allows no more."""


class Step(NamedTuple):
    """Token of an answer, with log-probabilities at its position.

    Attributes:
        offset: number of characters of the answer before the token.
        best: pairs of text and log-probability: of the token itself, then of the most probable tokens there.
    """

    offset: int
    best: tuple[tuple[str, float], ...]


class Client(Protocol):
    """Client of one server, over gRPC or HTTP, that asks for answers and measures them."""

    async def context(self) -> int | None:
        """Connect; return the limit of prompt and answer together in tokens, None if the server does not report it.

        Raises:
            SpecDecError: the server cannot be reached, or its answer is unusable.
        """

    async def count(self, prompt: str | Chat) -> int | None:
        """Return how many tokens a prompt has, as the server counts; None if the server does not report it."""

    async def complete(self, prompt: str | Chat, prompt_index: int, due_s: float | None) -> RequestRecord:
        """Send one prompt, and return the record of its answer; a failure is recorded, not raised.

        Args:
            prompt_index: number of the prompt in its set, for the record.
            due_s: monotonic seconds that count as the request's start; None: the moment when it leaves.
        """

    async def scored(self, prompt: str) -> tuple[str, list[Step]]:
        """Return the text of the answer to a prompt, and a step for each of its tokens.

        There are no steps if the server does not report log-probabilities.
        """


def asking(client: Client, prompts: Sequence[Prompt]) -> Ask:
    """Return a function that sends the prompt with a given number through the client, and returns its records."""
    turns = [len(prompt.turns) if isinstance(prompt, Conversation) else 1 for prompt in prompts]
    firsts = [0, *itertools.accumulate(turns)]
    return lambda index, due_s: _converse(client, prompts[index], firsts[index], due_s)


async def _converse(client: Client, prompt: Prompt, first: int, due_s: float | None) -> list[RequestRecord]:
    """Send a prompt, or a conversation's turns until one fails, and return a record of each.

    Args:
        first: number of the prompt, or of the first turn, for the records; further turns count on from it.
        due_s: see `Client.complete`; later turns start when they leave.
    """
    if isinstance(prompt, str):
        return [await client.complete(prompt, first, due_s)]
    records: list[RequestRecord] = []
    messages = [ChatMessage("system", prompt.system)] if prompt.system else []
    for number, turn in enumerate(prompt.turns, start=first):
        messages.append(ChatMessage("user", turn))
        records.append(await client.complete(Chat(tuple(messages)), number, None if records else due_s))
        if records[-1].error_code is not None:
            break  # without this answer, the rest would be another conversation
        messages.append(ChatMessage("assistant", records[-1].text))
    return records
