"""Completions from a fleet: what one server began, another can end with the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Protocol

from inference.commit import Event, Finished, FinishReason, Started
from inference.config import ConnectionConfig
from inference.errors import SpecDecError, UnavailableError
from inference.text.chat import Chat
from inference.workers.completion import CompletionRequest, ModelCard, Resume
from inference.workers.fleet import Fleet, Replica
from inference.workers.remote import RemoteCompleter
from inference.workers.resuming import Resuming

PREFIX_TOKENS, PREFIX_CHARACTERS = 64, 256
"""Length of a prompt's beginning, which finds the server that may have read it already."""


class Drafter(Protocol):
    """Draft worker in the process of a client."""

    def complete(
        self, remote: RemoteCompleter, replica: Replica, request: CompletionRequest
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a request at one server, and draft for it meanwhile; see `Completer.complete`."""


class FailoverCompleter:
    """`Completer` and `Codec` over the servers of a fleet.

    Args:
        fleet: servers of one model.
        connection: limits of a request's time, and of its time without a server.
        drafter: drafts for the requests in this process; None leaves drafts to the servers.
    """

    def __init__(self, fleet: Fleet, connection: ConnectionConfig, drafter: Drafter | None = None) -> None:
        self._drafter = drafter
        self._fleet = fleet
        self._connection = connection

    def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`. A request that has begun waits for a server; a new one is refused if there is none."""
        answer = _Answer(request)
        resuming: Resuming[Event] = Resuming(answer, self._fleet, self._connection, deadline=request.deadline)

        def attempt(replica: Replica) -> AsyncGenerator[Event, None]:
            answer.answered = self._fleet.is_ready(replica)
            at, rest = self._at(replica, deadline_s=resuming.left_s), answer.rest()
            return at.complete(rest) if self._drafter is None else self._drafter.complete(at, replica, rest)

        return resuming.events(attempt, prefix_of(request.prompt))

    def _at(self, replica: Replica, *, deadline_s: float | None = None) -> RemoteCompleter:
        deadline_s = self._connection.deadline_s if deadline_s is None else deadline_s
        can_move = self._fleet.has_other(replica.address)
        return RemoteCompleter(replica.channel, replica.address, deadline_s=deadline_s, can_move=can_move)

    async def model(self, *, timeout_s: float | None = None) -> ModelCard:
        """Return the card of the served model.

        Raises:
            SpecDecError: the call failed.
        """
        with self._fleet.lease() as replica:
            return await self._at(replica).model(timeout_s=timeout_s)

    async def encode(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        """See `Codec`."""
        with self._fleet.lease() as replica:
            return await self._at(replica).encode(prompt, special=special)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """See `Codec`."""
        with self._fleet.lease() as replica:
            return await self._at(replica).decode(token_ids)


class _Answer:
    """`Progress` of a completion.

    Attributes:
        answered: True if the latest server was ready when it was chosen.
    """

    def __init__(self, request: CompletionRequest) -> None:
        self._request = replace(request, draft_session="")  # it names a draft worker of the caller
        self.answered = False
        self._started: Started | None = None
        self._token_ids: list[int] = []
        self._reason: FinishReason | None = None

    @property
    def has_begun(self) -> bool:
        return self._started is not None

    @property
    def has_ended(self) -> bool:
        return self._reason is not None

    @property
    def closing(self) -> Event | None:
        """See `Progress`; `take` drops the servers' Finished, and this one replaces it."""
        return None if self._reason is None else Finished(self._reason)

    def take(self, event: Event) -> bool:
        """See `Progress`."""
        if isinstance(event, Started):
            is_news, self._started = self._started is None, self._started or event
            return is_news
        if isinstance(event, Finished):
            self._reason = event.reason
            return False
        self._token_ids += event.token_ids
        self._reason = event.finish_reason
        return True

    def lost(self, exc: SpecDecError) -> None:
        """See `Progress`; an answer that has begun can only continue if its model is known."""
        if self._started is not None and not self._started.provenance.model_id:
            why = "no other server can go on: this one draws its noise on a device, or names no model"
            raise UnavailableError(f"{exc.message} ({why})", address=exc.address) from exc

    def rest(self) -> CompletionRequest:
        """Return the request for the next server, with the parameters that the first server resolved."""
        if self._started is None:
            return self._request
        defaults = self._started.defaults
        complete = self._request if defaults is None else self._request.resolved(defaults)
        resume = Resume(tuple(self._token_ids), self._started.provenance)
        return replace(complete, seed=self._started.seed, prompt_logprobs=None, resume=resume)


def prefix_of(prompt: str | tuple[int, ...] | Chat) -> str:
    """Return a hash of the prompt's beginning, by which the fleet sends the turns of a conversation to one server.

    The beginning of a chat ends with the user's first message, which all later turns repeat.
    """
    if isinstance(prompt, Chat):
        roles = [message.role for message in prompt.messages]
        end = roles.index("user") + 1 if "user" in roles else 1
        return _hash(repr(prompt.messages[:end]))
    return _hash(prompt[:PREFIX_CHARACTERS] if isinstance(prompt, str) else repr(prompt[:PREFIX_TOKENS]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
