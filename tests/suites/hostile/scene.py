"""What an attacker knows: where the servers are, and what anybody may ask them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-not-found]  # it has no public name

from grpc_comm.specdec.v1 import specdec_pb2 as pb

Seen = Counter[str]
"""Number of attackers' calls by their final status, and of the messages that they sent, as "messages"."""
Recipe = Callable[["Scene", Seen], Awaitable[None]]

DEAF: list[tuple[str, int]] = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 5)]
"""Of a client that never reads."""
ANY_SIZE: list[tuple[str, int]] = [("grpc.max_send_message_length", -1)]
BROKEN = (grpc.aio.AioRpcError, asyncio.InvalidStateError, ExecuteBatchError)
"""What grpcio raises on a call that the server has ended meanwhile."""
RAW: dict[str, Any] = {"request_serializer": bytes, "response_deserializer": bytes}


@dataclass(frozen=True, slots=True)
class Scene:
    """Addresses of gRPC servers, ports of HTTP servers, and the target's card."""

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

    def opening(self, **fields: Any) -> pb.VerifyRequest:
        """The first message of a draft's session."""
        known = {"protocol_version": 1, "tokenizer_fingerprint": self.fingerprint, "vocab_size": self.vocab_size}
        asked = {"prompt_token_ids": [5, 6, 7], "sampling": pb.SamplingParams(seed=1), "max_new_tokens": 500}
        return pb.VerifyRequest(open=pb.Open(**{**known, **asked, **fields}))

    def attach(self, num_slots: int) -> pb.AssistRequest:
        """The first message of a pool worker."""
        attach = pb.Attach(protocol_version=1, tokenizer_fingerprint=self.fingerprint, vocab_size=self.vocab_size)
        attach.num_slots = num_slots
        return pb.AssistRequest(attach=attach)


@asynccontextmanager
async def dialled(address: str, options: list[tuple[str, int]] | None = None) -> AsyncGenerator[Any, None]:
    """A channel with a connection of its own; calls that are left on it end with it."""
    everything = [*(options or []), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=everything) as channel:
        yield channel


async def observed(call: Any, seen: Seen, name: str) -> None:
    """Read a call to its end, and note its status."""
    with suppress(*BROKEN):
        while await call.read() != grpc.aio.EOF:
            pass
    note_status(seen, name, await call.code(), await call.details())


def note_status(seen: Seen, name: str, code: grpc.StatusCode, details: str | None) -> None:
    """Count a status; one that our own side made of a write that failed (grpc #36066) by its own name."""
    is_ours = code is grpc.StatusCode.INTERNAL and details == "Internal error from Core"
    seen[f"{name} {'(write failed)' if is_ours else code.name}"] += 1
