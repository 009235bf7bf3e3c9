"""A client and its draft worker, made of only grpcio and the .proto, without this project's code."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc

TIMEOUT_S = 60.0
OWN_CONNECTION: list[tuple[str, int]] = [("grpc.use_local_subchannel_pool", 1)]
"""Channel options by which a channel shares its connection with no other channel of this process."""


def after(prefix_length: int, *token_ids: int) -> pb.Branch:
    """Return a branch of draft tokens that follows the first `prefix_length` tokens of the sequence."""
    return pb.Branch(prefix_length=prefix_length, token_ids=token_ids)


def below(parent_node: int, *token_ids: int) -> pb.Branch:
    """Return a branch of draft tokens that follows an earlier draft token, number `parent_node` of its session."""
    return pb.Branch(parent_node=parent_node, token_ids=token_ids)


def proposing(session_id: str, *branches: pb.Branch) -> pb.AssistRequest:
    """Return the message by which a draft worker proposes branches of draft tokens for a session.

    `session_id` is from the target; a private worker's is `draft_session` of the request in hexadecimal digits.
    """
    return pb.AssistRequest(propose=pb.AssistPropose(session_id=session_id, propose=pb.Propose(branches=branches)))


@dataclass
class RawWorker:
    """A client's draft worker, attached to a target, and the channel that it and the client's requests share.

    Attributes:
        call: the worker's stream (Assist), on which it sends proposals and reads the target's messages.
        metadata: gRPC metadata of the client's requests.
        writes: lock that a writer to `call` must hold.
    """

    channel: grpc.aio.Channel
    call: Any
    metadata: Sequence[tuple[str, str]] = ()
    writes: asyncio.Lock = field(default_factory=asyncio.Lock)

    def request(self, message: pb.GenerateRequest, *, name: bytes | None = None) -> RawSession:
        """Return a session with a copy of this request, which is not sent yet.

        `name` connects request and draft tokens; None makes a new one.
        """
        session = RawSession(self, pb.GenerateRequest())
        session.name = name or session.name
        session.message.MergeFrom(message)
        session.message.draft_session = session.name
        return session

    async def closed(self) -> str:
        """Read the target's next message to this worker, which must close a session; return that session's id."""
        response = await self.call.read()
        assert response.WhichOneof("message") == "close"
        return str(response.close.session_id)


async def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Read a stream until it ends; return its gRPC status and the server's message about it."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() != grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


@dataclass
class RawSession:
    """A client's request for which a `RawWorker` drafts, and the part of the answer that was read so far.

    Attributes:
        name: name by which the target connects request and draft tokens.
        call: stream of the answer; None until the request is sent.
        deltas: the answer's messages with new tokens, whose token ids are in `token_ids`.
    """

    worker: RawWorker
    message: pb.GenerateRequest
    name: bytes = field(default_factory=partial(secrets.token_bytes, 16))
    call: Any = None
    started: pb.Started | None = None
    deltas: list[pb.Delta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def send(self) -> RawSession:
        """Send the request, without waiting for an answer; return this session."""
        stub = rpc.GenerationServiceStub(self.worker.channel)
        self.call = stub.Generate(self.message, timeout=TIMEOUT_S, metadata=self.worker.metadata)
        return self

    async def propose(self, *branches: pb.Branch) -> None:
        """Send branches of draft tokens to the target for this session, even if its request is not sent yet."""
        async with self.worker.writes:  # gRPC takes one message of a stream at a time
            await self.worker.call.write(proposing(self.name.hex(), *branches))

    async def delta(self) -> pb.Delta | None:
        """Read the answer's next Delta (new tokens), record it and return it; None if the answer has ended.

        Raises:
            AioRpcError: the target ends the answer with an error.
        """
        while (response := await self.call.read()) != grpc.aio.EOF:
            if response.HasField("started"):
                self.started = response.started
            elif response.HasField("delta"):
                self.deltas.append(response.delta)
                self.token_ids += response.delta.token_ids
                return self.deltas[-1]
        return None

    async def rest(self) -> list[int]:
        """Read the answer to its end; return all of its token ids, those read before included."""
        while await self.delta() is not None:
            pass
        return self.token_ids


def attach(card: pb.GetModelResponse, **fields: Any) -> pb.AssistRequest:
    """Return a draft worker's first message, Attach, that fits the target's `card`; `fields` replace fields of it."""
    words = {"tokenizer_fingerprint": card.tokenizer_fingerprint, "vocab_size": card.vocab_size}
    return pb.AssistRequest(attach=pb.Attach(**{"protocol_version": 2, **words, "num_slots": 8, **fields}))


@asynccontextmanager
async def raw_worker(
    address: str, *metadata: tuple[str, str], options: Sequence[tuple[str, int]] = (), ca: bytes = b"", **fields: Any
) -> AsyncGenerator[RawWorker, None]:
    """Attach a draft worker on a new connection, and yield it until the block ends.

    It drafts only for its own client's requests, unless `fields` of its Attach message say otherwise.

    Args:
        metadata: gRPC metadata of every call.
        options: further options of the channel.
        ca: certificate (PEM) of the CA that the target's certificate is from; if empty, the connection has no TLS.

    Raises:
        AioRpcError: the target refuses the worker.
    """
    ways = [*OWN_CONNECTION, *options]
    async with (
        grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options=ways)
        if ca
        else grpc.aio.insecure_channel(address, options=ways)
    ) as channel:
        card = await rpc.GenerationServiceStub(channel).GetModel(
            pb.GetModelRequest(), timeout=TIMEOUT_S, metadata=metadata
        )
        call = rpc.VerificationServiceStub(channel).Assist(timeout=2 * TIMEOUT_S, metadata=metadata)
        try:
            await call.write(attach(card, **{"is_private": True, **fields}))
            assert (await call.read()).WhichOneof("message") == "attached"
            yield RawWorker(channel, call, metadata)
        finally:
            call.cancel()
