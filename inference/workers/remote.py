"""The thin client: completions from any GenerationService. Needs no model and no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import grpc

from grpc_comm.channel import check_handshake, open_channel, wait_until_ready
from grpc_comm.secured import Credentials, watched_token
from grpc_comm.spans import carrying
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from grpc_comm.tls import ClientTls
from grpc_comm.watched import UnusableError
from inference.commit import Event, Started
from inference.config import ConnectionConfig, DialSecurity
from inference.errors import (
    ConfigError,
    ForbiddenError,
    HandshakeError,
    IncompatibleDraftError,
    InvalidRequestError,
    SpecDecError,
    UnauthenticatedError,
)
from inference.text.chat import Chat
from inference.workers.admitting import passed_on
from inference.workers.completion import CompletionRequest, ModelCard
from inference.workers.continuity import Continuity
from inference.workers.convert import (
    card_from_message,
    completion_to_message,
    event_from_message,
    tokenize_to_message,
)
from inference.workers.status import calls_to

CARD_TIMEOUT_S = 5.0
TARGET = "target"
"""Topology of a server that verifies for draft workers."""
MAX_DEADLINE_S = 1e8
"""gRPC takes much longer ones for times that are over."""


class RemoteCompleter:
    """A `Completer` at HOST:PORT, and a `Codec`.

    Args:
        channel: to the server; stays open.
        address: HOST:PORT, for messages.
        deadline_s: seconds a request may take.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, *, deadline_s: float) -> None:
        self._stub = rpc.GenerationServiceStub(channel)
        self._address = address
        self._deadline_s = min(deadline_s, MAX_DEADLINE_S)

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`."""
        call = self._stub.Generate(completion_to_message(request), timeout=self._timeout_s(request))
        answer = Continuity(self._address, has_tokens=request.max_new_tokens != 0)
        try:
            with calls_to(self._address):
                async for message in call:
                    event = event_from_message(message)
                    if isinstance(event, Started) and request.grammar is not None and not event.has_grammar:
                        fault = "grammar: this server knows none, and would have answered without"
                        raise InvalidRequestError(fault, field="grammar", address=self._address)
                    answer.check(event)
                    yield event
            answer.check_end()
        finally:
            call.cancel()

    def _timeout_s(self, request: CompletionRequest) -> float:
        if request.deadline is None:
            return self._deadline_s
        return min(self._deadline_s, max(0.0, request.deadline - asyncio.get_running_loop().time()))

    async def model(self, *, timeout_s: float | None = None) -> ModelCard:
        """What the server serves.

        Raises:
            SpecDecError: the call failed.
        """
        with calls_to(self._address):
            message = await self._stub.GetModel(pb.GetModelRequest(), timeout=timeout_s or self._deadline_s)
        return card_from_message(message)

    async def encode(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        """See `Codec`."""
        message = tokenize_to_message(prompt, special=special)
        with calls_to(self._address):
            return tuple((await self._stub.Tokenize(message, timeout=self._deadline_s)).token_ids)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """See `Codec`."""
        message = pb.DetokenizeRequest(token_ids=token_ids)
        with calls_to(self._address):
            return str((await self._stub.Detokenize(message, timeout=self._deadline_s)).text)


@asynccontextmanager
async def connected(connection: ConnectionConfig) -> AsyncGenerator[grpc.aio.Channel, None]:
    """A channel to a server, once it answers.

    Raises:
        ConfigError: a file of certificates, or with the token, cannot be used.
        UnavailableError: it does not answer in time.
    """
    address, keys = connection.address, credentials_of(connection.security)
    async with open_channel(address, keys) as channel:
        with calls_to(address):
            tls = None if keys is None else keys.tls
            await wait_until_ready(channel, address, timeout_s=connection.connect_timeout_s, tls=tls)
        yield carrying(channel, passed_on)


def credentials_of(security: DialSecurity) -> Credentials | None:
    """What a channel is opened with; None: nothing but an address.

    Raises:
        ConfigError: a file of certificates, or with the token, cannot be used.
    """
    if security.ca is None and security.token_file is None:
        return None
    try:
        token = None if security.token_file is None else watched_token(security.token_file)
        tls = _tls_of(security)
        if tls is not None:
            tls.grpc_credentials()
    except (UnusableError, OSError) as exc:
        raise ConfigError(str(exc)) from exc
    return Credentials(tls, token)


def _tls_of(security: DialSecurity) -> ClientTls | None:
    if security.ca is None:
        return None
    return ClientTls(security.ca, security.cert, security.key, security.server_name)


async def check_link(address: str, security: DialSecurity) -> None:
    """After a lost link: tell a server that is gone from one that can be reached and not be trusted.

    Raises:
        HandshakeError: there is no TLS with it, for a reason that is named.
    """
    tls = _tls_of(security)
    if tls is not None:
        with calls_to(address):
            await check_handshake(address, tls)


async def card_of_target(channel: grpc.aio.Channel, address: str) -> ModelCard | None:
    """The card of the target at the channel's other end; None of one that only verifies.

    Raises:
        IncompatibleDraftError: it is another kind of server, whose requests have their draft already.
    """
    try:
        card = await RemoteCompleter(channel, address, deadline_s=CARD_TIMEOUT_S).model()
    except (HandshakeError, UnauthenticatedError, ForbiddenError):
        raise
    except SpecDecError:
        return None
    if card.topology != TARGET:
        raise IncompatibleDraftError(
            f"a {card.topology} server answers there, which no draft worker can help: it wants a --role target",
            address=address,
        )
    return card
