"""GenerationService over any completer: the public face of every topology."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import grpc

from grpc_comm.call import Call
from grpc_comm.options import max_request_bytes
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.errors import NotFoundError
from inference.workers.calls.admitting import private_scope
from inference.workers.calls.convert import (
    card_to_message,
    completion_from_message,
    event_to_message,
    tokenize_from_message,
)
from inference.workers.completing.operation import Operation
from inference.workers.completing.scored import ScoreWriter
from inference.workers.completion import Codec, Completer, ModelCard


class GenerationServicer(rpc.GenerationServiceServicer):  # type: ignore[misc]
    """Translator between GenerationService and a completer; owns no algorithm.

    Args:
        codec: codec of the model's tokenizer; without it the server does not tokenize for clients.
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
        """See `Servicer`."""
        return max_request_bytes(self.card.max_length)

    def add_to(self, server: grpc.aio.Server) -> None:
        """See `Servicer`."""
        rpc.add_GenerationServiceServicer_to_server(self, server)

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:
        """Stream one request's events."""
        completion = replace(completion_from_message(request), deadline=call.deadline)
        if completion.draft_session:
            completion = replace(completion, draft_session=private_scope(call.peer) + completion.draft_session)
        async with aclosing(self.completer.complete(completion)) as events:
            async for event in events:
                await self._writer.write(call, event_to_message, event, getattr(event, "prompt_logprobs", ()))

    async def GetModel(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        """Return the card of the served model."""
        return card_to_message(self.card)

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        """Return the token ids of a prompt."""
        prompt, special = tokenize_from_message(request), not request.without_special_tokens
        return pb.TokenizeResponse(token_ids=await self._codec().encode(prompt, special=special))

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        return pb.DetokenizeResponse(text=await self._codec().decode(request.token_ids))

    async def GetLoad(self, request: pb.GetLoadRequest, call: Call) -> pb.GetLoadResponse:
        """Return the load of the server."""
        operation = self._operated()
        load = operation.load
        counts = {name: getattr(load, name) for name in ("num_slots", "num_running", "num_waiting")}
        return pb.GetLoadResponse(**counts, draining=operation.is_draining)

    async def Drain(self, request: pb.DrainRequest, call: Call) -> pb.DrainResponse:
        """Make the server drain and end."""
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
