"""GenerationService, the gRPC API for clients: completion, tokenization, and a server's model card, load and end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import grpc

from specdec.grpc_comm.call import Call
from specdec.grpc_comm.options import max_request_bytes
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.commit import TextEvent
from specdec.inference.errors import CapacityError, ForbiddenError, NotFoundError
from specdec.inference.observe.metrics import Load
from specdec.inference.workers.calls.admitting import private_scope
from specdec.inference.workers.calls.convert import (
    card_to_message,
    completion_from_message,
    converted,
    event_to_message,
    tokenize_from_message,
)
from specdec.inference.workers.completion import Codec, Completer, ModelCard


class Operation:
    """What clients can learn and change of a server's operation: they may read its load, and make it drain and end.

    Args:
        load: numbers of the server's slots, and of its running and waiting requests.
        may_drain: True if a gRPC call may make the server finish its requests and end.

    Attributes:
        is_draining: True once the server drains; the host (inference/serving/host.py) sets it.
    """

    def __init__(self, load: Load, *, may_drain: bool) -> None:
        self.load = load
        self.is_draining = False
        self._may_drain = may_drain
        self._asked = asyncio.Event()

    def drain(self) -> None:
        """Make the server drain (finish its requests, and take no new ones) and end, as SIGTERM does.

        Raises:
            ForbiddenError: calls may not drain this server, since without an auth file every client could end it.
        """
        if not self._may_drain:
            raise ForbiddenError("without an auth file all may do everything but end it: drain needs an --auth_file")
        self._asked.set()

    async def until_drain(self) -> None:
        """Wait until `drain` has been called."""
        await self._asked.wait()


MAX_UNREAD_SCORES = 1_000_000
"""Most log-probabilities of prompts that may wait for clients to read them, in all calls; each takes some 250 bytes."""
RETRY_AFTER_S = 5.0


class ScoreWriter:
    """Writer of answers' messages, which limits how many log-probabilities of prompts ("scores") wait to be read.

    The scores of 2000 prompt tokens, with the 20 best tokens at each, take 10 MB until the client has read them. The
    engine's slots do not limit this: a request for one output token has freed its slot by then.
    """

    def __init__(self) -> None:
        self._num_unread = 0

    async def write(self, call: Call, event: TextEvent) -> None:
        """Send an event of an answer as a message of the gRPC call; return once gRPC has taken the message.

        Raises:
            CapacityError: with the event's log-probabilities of the prompt, more than `MAX_UNREAD_SCORES` would wait to
                be read. While no others wait, an event may have any number.
        """
        if not (scores := getattr(event, "prompt_logprobs", ())):
            return await call.write(event_to_message(event))
        num_scores = sum(len(each.token_ids) for each in scores)
        if self._num_unread and self._num_unread + num_scores > MAX_UNREAD_SCORES:
            message = f"prompt_logprobs: {self._num_unread} of this server wait to be read (limit {MAX_UNREAD_SCORES})"
            raise CapacityError(message, retry_after_s=RETRY_AFTER_S)
        self._num_unread += num_scores
        try:
            await call.write(await converted(event_to_message, event, scores))
        finally:
            self._num_unread -= num_scores


class GenerationServicer(rpc.GenerationServiceServicer):  # type: ignore[misc]
    """Implementation of the gRPC GenerationService by a completer: it translates requests, and the answers' events.

    Args:
        completer: completer that answers.
        card: description of the served model, which GetModel answers.
        codec: converter of texts and token ids; without it, the server does not tokenize for clients.
        operation: load and drain of the server; without it, no call reports its load or ends it.
    """

    service_name = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

    def __init__(
        self, completer: Completer, card: ModelCard, codec: Codec | None = None, operation: Operation | None = None
    ) -> None:
        self.completer = completer
        self.card = card
        self.codec = codec
        self._operation = operation
        self._writer = ScoreWriter()

    @property
    def max_request_bytes(self) -> int:
        """Return the length in bytes of the longest message that the service's methods accept."""
        return max_request_bytes(self.card.max_length)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register this service with a gRPC server, which must not have started yet."""
        rpc.add_GenerationServiceServicer_to_server(self, server)

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:
        """Answer one request: send each event of the answer as a message of the call.

        Raises:
            InvalidRequestError: the request is not valid.
            SpecDecError: the completer failed; see `Completer.complete`.
        """
        completion = replace(completion_from_message(request), deadline=call.deadline)
        if completion.draft_session:
            completion = replace(completion, draft_session=private_scope(call.peer) + completion.draft_session)
        async with aclosing(self.completer.complete(completion)) as events:
            async for event in events:
                await self._writer.write(call, event)

    async def GetModel(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        """Return the served model's card, which describes the model."""
        return card_to_message(self.card)

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        """Return the token ids of a text or a conversation.

        Raises:
            NotFoundError: this server does not tokenize for clients.
        """
        prompt, special = tokenize_from_message(request), not request.without_special_tokens
        return pb.TokenizeResponse(token_ids=await self._codec().encode(prompt, special=special))

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        """Return the text of token ids.

        Raises:
            NotFoundError: this server does not tokenize for clients.
        """
        return pb.DetokenizeResponse(text=await self._codec().decode(request.token_ids))

    async def GetLoad(self, request: pb.GetLoadRequest, call: Call) -> pb.GetLoadResponse:
        """Return the server's numbers of slots, running and waiting requests, and whether it is draining.

        Raises:
            NotFoundError: this server does not report its load.
        """
        operation = self._operated()
        load = operation.load
        counts = {name: getattr(load, name, 0) for name in ("num_slots", "num_running", "num_waiting")}
        return pb.GetLoadResponse(**counts, draining=operation.is_draining)

    async def Drain(self, request: pb.DrainRequest, call: Call) -> pb.DrainResponse:
        """Make the server finish its requests, take no new ones, and end; return at once.

        Raises:
            ForbiddenError: gRPC calls may not end this server.
            NotFoundError: this kind of server has no end that a call can begin.
        """
        self._operated().drain()
        return pb.DrainResponse()

    def _operated(self) -> Operation:
        if self._operation is None:
            raise NotFoundError("this server has no load to report, and no end to begin")
        return self._operation

    def _codec(self) -> Codec:
        if self.codec is None:
            raise NotFoundError("this server has no tokenizer for others")
        return self.codec
