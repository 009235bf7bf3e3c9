"""The thin client: completions from any GenerationService. Needs no model and no torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.commit import Event
from inference.workers.completion import CompletionRequest
from inference.workers.convert import completion_to_message, event_from_message
from inference.workers.status import from_rpc_error

MAX_DEADLINE_S = 1e8
"""gRPC takes much longer ones for times that are over."""


class RemoteCompleter:
    """A `Completer` at HOST:PORT.

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
        call = self._stub.Generate(completion_to_message(request), timeout=self._deadline_s)
        try:
            async for message in call:
                yield event_from_message(message)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, self._address) from exc
        finally:
            call.cancel()

    async def model(self) -> pb.GetModelResponse:
        """What the server serves.

        Raises:
            SpecDecError: the call failed.
        """
        try:
            card: pb.GetModelResponse = await self._stub.GetModel(pb.GetModelRequest(), timeout=self._deadline_s)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, self._address) from exc
        return card
