"""Speakers, the functions that answer in a conversation: their type, and the one that asks this project's servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import NamedTuple, TypeAlias

from specdec.inference.commit import Delta, Started
from specdec.inference.request import LEFT_TO_SERVER
from specdec.inference.serving.edge import Edge
from specdec.inference.text.chat import Chat
from specdec.inference.text.reasoning import Reasoning, is_begun
from specdec.inference.workers.completion import CompletionRequest

Messages: TypeAlias = list[dict[str, str]]
"""Messages of a conversation in the form of OpenAI's API."""
Options: TypeAlias = Mapping[str, int]
"""Values of the parameters `gamma` and `seed`, by name; one that is missing is left to the server."""


class Piece(NamedTuple):
    """Piece of an answer's text.

    Attributes:
        is_thought: True if it belongs to the reasoning before the answer.
        is_accepted: True if it comes from an accepted draft token.
    """

    text: str
    is_thought: bool = False
    is_accepted: bool = False


Pieces: TypeAlias = AsyncGenerator[Piece, None]
Speaker: TypeAlias = Callable[[Messages, Options], Pieces]
"""Function that yields the answer to messages, piece by piece; it raises only SpecDecErrors."""


async def ask_server(servers: Edge, deadline_s: float, messages: Messages, options: Options) -> Pieces:
    """Ask a server of this project over gRPC; yield its answer to the messages, piece by piece.

    Args:
        servers: connection to the servers, of which one answers.
        deadline_s: seconds that the answer may take.
    """
    request = CompletionRequest(
        Chat.read(messages),
        seed=options.get("seed"),
        max_new_tokens=None,
        gamma=options.get("gamma"),
        unsaid=frozenset(LEFT_TO_SERVER),
        echo=True,  # the end of the prompt shows whether the template has begun a thought
        deadline=asyncio.get_running_loop().time() + deadline_s,
    )
    async with aclosing(servers.completer.complete(request)) as events:
        async for event in events:
            if isinstance(event, Started):
                reasoning = Reasoning(begun=is_begun(event.prompt_text))
            for text, is_accepted in event.marked() if isinstance(event, Delta) else ():
                thought, rest = reasoning.push(text, is_last=False)
                yield Piece(thought, True, is_accepted)
                yield Piece(rest, False, is_accepted)
    thought, rest = reasoning.push("", is_last=True)
    yield Piece(thought, True)
    yield Piece(rest)
