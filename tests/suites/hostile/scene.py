"""What the attackers of the hostile suite know: the servers' addresses, and requests that any client may send."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-not-found]  # it has no public name

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from tests.support.raw_worker import attach

Seen = Counter[str]
"""Number of the attackers' calls by attack and final status; "messages" counts messages that fuzzing has sent."""
Recipe = Callable[["Scene", Seen], Awaitable[None]]

DEAF: list[tuple[str, int]] = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 5)]
"""Options of a channel whose connection reads next to nothing from its socket."""
ANY_SIZE: list[tuple[str, int]] = [("grpc.max_send_message_length", -1)]
BROKEN = (grpc.aio.AioRpcError, asyncio.InvalidStateError, ExecuteBatchError)
"""Errors that grpcio raises on a call which the server has ended meanwhile."""
NAME = bytes(range(16))
"""Name that a request and its client's draft worker both give, by which the target finds the worker's tokens."""
RAW: dict[str, Any] = {"request_serializer": bytes, "response_deserializer": bytes}


@dataclass(frozen=True, slots=True)
class Scene:
    """Addresses of the gRPC servers, ports of the HTTP servers, and the target's tokenizer and vocabulary size.

    Attributes:
        draft: address of the server with only the draft model.
        fused, fused_port: address, and HTTP port, of the server with both models.
        fingerprint: the tokenizer's fingerprint, which a draft worker must name.
        seed: seed of the attackers' random choices.
    """

    target: str
    draft: str
    fused: str
    gateway_port: int
    fused_port: int
    fingerprint: str
    vocab_size: int
    seed: int

    @property
    def grpc_servers(self) -> tuple[str, ...]:
        return self.target, self.draft, self.fused

    @property
    def http_ports(self) -> tuple[int, ...]:
        return self.gateway_port, self.fused_port

    def request(self, **fields: Any) -> pb.GenerateRequest:
        """Return a request, with `fields` changed, for which the client's own draft worker proposes tokens.

        The target waits for each proposal.
        """
        asked = {"token_ids": pb.TokenIds(ids=[5, 6, 7]), "max_new_tokens": 500, "schedule": pb.SCHEDULE_SYNC}
        return pb.GenerateRequest(**{**asked, "draft_session": NAME, **fields})

    def attach(self, num_slots: int, *, is_private: bool = False) -> pb.AssistRequest:
        """Return the first message of a draft worker, which offers to draft for `num_slots` requests at a time."""
        words = pb.GetModelResponse(tokenizer_fingerprint=self.fingerprint, vocab_size=self.vocab_size)
        return attach(words, num_slots=num_slots, is_private=is_private)


@asynccontextmanager
async def dialled(address: str, options: list[tuple[str, int]] | None = None) -> AsyncGenerator[Any, None]:
    """Open a channel with a connection of its own until the block ends; calls that are still open end with it."""
    everything = [*(options or []), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=everything) as channel:
        yield channel


async def observed(call: Any, seen: Seen, name: str) -> None:
    """Read a call to its end; count its status in `seen` under the attack's `name`."""
    with suppress(*BROKEN):
        while await call.read() != grpc.aio.EOF:
            pass
    note_status(seen, name, await call.code(), await call.details())


def note_status(seen: Seen, name: str, code: grpc.StatusCode, details: str | None) -> None:
    """Count a status in `seen` under an attack's `name`; one that grpcio made of a failed write is counted apart."""
    is_ours = code is grpc.StatusCode.INTERNAL and details == "Internal error from Core"
    seen[f"{name} {'(write failed)' if is_ours else code.name}"] += 1
