"""Completer that uses several servers of a model: if one is lost, another continues its answer with the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeAlias

from specdec.inference.commit import TextEvent
from specdec.inference.config import ConnectionConfig
from specdec.inference.text.chat import Chat
from specdec.inference.workers.calls.fleet import Fleet, Replica
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completing.resuming import Progress, Resuming
from specdec.inference.workers.completion import CompletionRequest

PREFIX_TOKENS, PREFIX_CHARACTERS = 64, 256
"""Numbers of tokens, or of characters, at a prompt's beginning that `prefix_of` hashes."""


Complete: TypeAlias = Callable[[RemoteCompleter, Replica, CompletionRequest], AsyncGenerator[TextEvent, None]]
"""Function of a server's completer, that server, and a request: it yields the events of the server's answer, and
meanwhile drafts tokens for the request and sends them to the same server."""


class FailoverCompleter:
    """`Completer` and `Codec` that use any of several servers of one model.

    Args:
        fleet: servers of one model.
        connection: settings with the longest time of a request, and its longest time without a server, in seconds.
        drafted: function that asks a server while this process's own draft worker drafts for the request; None leaves
            drafting to the servers.
    """

    def __init__(self, fleet: Fleet, connection: ConnectionConfig, drafted: Complete | None = None) -> None:
        self._drafted = drafted
        self._fleet = fleet
        self._connection = connection

    def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        """Yield the events of an answer; see `Completer.complete`.

        A request that has lost its server waits for another one. While no server is ready, a new request waits if this
        process drafts; otherwise it fails at once, unless a server was ready a few seconds ago.
        """
        answer = Progress(request)
        waits = self._drafted is not None
        resuming = Resuming(answer, self._fleet, self._connection, waits_to_begin=waits)

        def attempt(replica: Replica) -> AsyncGenerator[TextEvent, None]:
            answer.answered = self._fleet.is_ready(replica)
            at, rest = self._at(replica, deadline_s=resuming.left_s), answer.rest()
            return at.complete(rest) if self._drafted is None else self._drafted(at, replica, rest)

        return resuming.events(attempt, prefix_of(request.prompt))

    def _at(self, replica: Replica, *, deadline_s: float | None = None) -> RemoteCompleter:
        deadline_s = self._connection.deadline_s if deadline_s is None else deadline_s
        can_move = self._fleet.has_other(replica.address)
        return RemoteCompleter(replica.channel, replica.address, deadline_s=deadline_s, can_move=can_move)

    async def encode(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text or a conversation, as one of the servers tokenizes it.

        Args:
            special: True to add the model's special tokens to a text.
        """
        with self._fleet.lease() as replica:
            return await self._at(replica).encode(prompt, special=special)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, as one of the servers decodes them."""
        with self._fleet.lease() as replica:
            return await self._at(replica).decode(token_ids)


def prefix_of(prompt: str | tuple[int, ...] | Chat) -> str:
    """Return a hash of a prompt's beginning. Prompts with equal hashes go to the same server, which may have it cached.

    The beginning of a chat ends with the user's first message, which all later turns repeat.
    """
    if isinstance(prompt, Chat):
        roles = [message.role for message in prompt.messages]
        end = roles.index("user") + 1 if "user" in roles else 1
        return _hash(repr(prompt.messages[:end]))
    return _hash(prompt[:PREFIX_CHARACTERS] if isinstance(prompt, str) else repr(prompt[:PREFIX_TOKENS]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
