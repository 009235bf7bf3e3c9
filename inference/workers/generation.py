"""GenerationService over any completer: the public face of every topology."""

from __future__ import annotations

from contextlib import aclosing

import grpc

from grpc_comm.interceptors import Context
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.workers.completion import Completer, ModelCard
from inference.workers.convert import card_to_message, completion_from_message, event_to_message


class GenerationServicer(rpc.GenerationServiceServicer):  # type: ignore[misc]
    """Translates; owns no algorithm."""

    service_name = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

    def __init__(self, completer: Completer, card: ModelCard) -> None:
        self.completer = completer
        self.card = card

    def add_to(self, server: grpc.aio.Server) -> None:
        """See `Servicer`."""
        rpc.add_GenerationServiceServicer_to_server(self, server)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream one request's events."""
        async with aclosing(self.completer.complete(completion_from_message(request))) as events:
            async for event in events:
                await context.write(event_to_message(event))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Say what is served."""
        return card_to_message(self.card)
