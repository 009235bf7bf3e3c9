"""Completer that asks one server by gRPC, and functions that get a server's model card; neither needs a model here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import grpc

from specdec.grpc_comm.call import CAN_MOVE
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.commit import Started, TextEvent
from specdec.inference.errors import IncompatibleDraftError, InvalidRequestError, UnavailableError
from specdec.inference.text.chat import Chat
from specdec.inference.workers.calls.convert import (
    card_from_message,
    completion_to_message,
    event_from_message,
    tokenize_to_message,
)
from specdec.inference.workers.calls.fleet import Fleet
from specdec.inference.workers.calls.status import calls_to
from specdec.inference.workers.completing.output import Output
from specdec.inference.workers.completion import CompletionRequest, ModelCard

CARD_TIMEOUT_S = 5.0
TARGET, FUSED, DISTRIBUTED, GATEWAY = "target", "fused", "distributed", "gateway"
"""Kinds of servers, as values of `ModelCard.topology`: a target to which draft workers can attach, a server with target
and draft model, a draft worker that serves clients, and a process that passes requests on to other servers."""
MAX_DEADLINE_S = 1e8
"""Longest time limit of a gRPC call in seconds. From a much longer one, gRPC computes a deadline in the past."""


class RemoteCompleter:
    """`Completer` and `Codec` that pass everything on to one server.

    Args:
        channel: channel to the server; its owner closes it.
        address: HOST:PORT of the server, for error messages.
        deadline_s: seconds that a request may take.
        can_move: True to let a server that drains end the call, because the caller can continue the answer elsewhere.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, *, deadline_s: float, can_move: bool = False) -> None:
        self._stub = rpc.GenerationServiceStub(channel)
        self._address = address
        self._deadline_s = min(deadline_s, MAX_DEADLINE_S)
        self._metadata = CAN_MOVE if can_move else None
        self._num_bytes = 0

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        """Yield the events of the server's answer, see `Completer.complete`; closing the iterator cancels the call."""
        message, timeout_s = completion_to_message(request), self._timeout_s(request)
        call = self._stub.Generate(message, timeout=timeout_s, metadata=self._metadata)
        num_committed = 0 if request.resume is None else len(request.resume.token_ids)
        answer = Output(self._address, limit=request.max_new_tokens, num_committed=num_committed)
        try:
            with calls_to(self._address):
                async for message in call:
                    self._num_bytes += message.ByteSize()
                    scores = message.started.prompt_logprobs
                    if scores and request.prompt_logprobs is None:
                        fault = f"prompt_logprobs has {len(scores)} elements, and none were asked for"
                        raise UnavailableError(fault, address=self._address)
                    event = await answer.converted(event_from_message, message, scores)
                    if isinstance(event, Started):
                        self._check_started(request, event)
                    answer.check(event)
                    yield event
            answer.check_end()
        finally:
            call.cancel()

    def _check_started(self, request: CompletionRequest, started: Started) -> None:
        """Check by an answer's first event that the server obeys the request's grammar and adapter.

        For the rest of an answer that another server began, check too that this server has the same model.

        Raises:
            InvalidRequestError: the server would ignore the grammar or the adapter.
            IncompatibleDraftError: the server would continue the answer with other tokens than the first one.
        """
        ignored = "grammar" if request.grammar is not None and not started.has_grammar else ""
        if ignored or started.adapter != request.adapter:
            ignored = ignored or "adapter"
            fault = f"{ignored}: this server knows none, and would have answered without"
            raise InvalidRequestError(fault, field=ignored, address=self._address)
        if request.resume is not None:
            request.resume.provenance.require_same(started.provenance)

    def take_bytes(self) -> int:
        """Return how many bytes of messages have come since the last call of this method, without HTTP/2's framing."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def _timeout_s(self, request: CompletionRequest) -> float:
        if request.deadline is None:
            return self._deadline_s
        return min(self._deadline_s, max(0.0, request.deadline - asyncio.get_running_loop().time()))

    async def model(self, *, timeout_s: float | None = None) -> ModelCard:
        """Return the card (description) of the model that the server serves.

        Args:
            timeout_s: longest time of the call in seconds; None: that of a request.

        Raises:
            SpecDecError: the call failed.
        """
        with calls_to(self._address):
            message = await self._stub.GetModel(pb.GetModelRequest(), timeout=timeout_s or self._deadline_s)
        return card_from_message(message)

    async def encode(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text or a conversation, as the server tokenizes it.

        Args:
            special: True to add the model's special tokens to a text.
        """
        message = tokenize_to_message(prompt, special=special)
        with calls_to(self._address):
            return tuple((await self._stub.Tokenize(message, timeout=self._deadline_s)).token_ids)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, as the server decodes them."""
        message = pb.DetokenizeRequest(token_ids=token_ids)
        with calls_to(self._address):
            return str((await self._stub.Detokenize(message, timeout=self._deadline_s)).text)


async def card_of(fleet: Fleet) -> ModelCard:
    """Return the card (description) of the model that the servers of `fleet` serve, as one of them gives it.

    Raises:
        SpecDecError: the call failed.
    """
    with fleet.lease() as replica:
        return await RemoteCompleter(replica.channel, replica.address, deadline_s=CARD_TIMEOUT_S).model()


async def card_of_target(fleet: Fleet) -> ModelCard:
    """Return the card (description) of a fleet's model, after a check that the server that gives it is a target.

    Raises:
        SpecDecError: the call failed.
        IncompatibleDraftError: draft workers cannot attach to the server: it has a draft model, or is a gateway.
    """
    card = await card_of(fleet)
    if card.topology != TARGET:
        raise IncompatibleDraftError(
            f"a {card.topology} server answers there, which no draft worker can help: it wants a --role target",
            address=fleet.label,
        )
    return card
