"""Answers over gRPC: after the end of a stream, the client checks that no message was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from specdec.comparison.plan.config import Contender, PromptSet, Topology, WorkloadConfig
from specdec.comparison.plan.record import RequestRecord
from specdec.comparison.run.grpc_client import grpc_client
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.config import PLAIN

STARTED = pb.GenerateResponse(
    started=pb.Started(num_prompt_tokens=4, model_id="m", defaults=pb.RequestDefaults(max_new_tokens=6))
)
DELTAS = [pb.GenerateResponse(delta=pb.Delta(position=at, token_ids=[7, 8])) for at in (4, 6, 8)]
DELTAS[-1].delta.finish_reason = pb.FINISH_REASON_LENGTH
FINISHED = pb.GenerateResponse(finished=pb.GenerationFinished(reason=pb.FINISH_REASON_LENGTH))
WHOLE = [message.SerializeToString() for message in (STARTED, *DELTAS, FINISHED)]


async def answered_by(messages: Sequence[bytes]) -> RequestRecord:
    """Return the client's record of an answer that consists of exactly these messages, sent by a real server."""

    async def generate(_request: bytes, _context: Any) -> Any:
        for message in messages:
            yield message

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("specdec.v1.GenerationService", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    workload = WorkloadConfig((PromptSet("kind", ("prompt",)),), max_new_tokens=6, deadline_s=20.0)
    try:
        async with grpc_client(f"127.0.0.1:{port}", PLAIN, workload, Contender(Topology.TARGET)) as client:
            return await client.complete("prompt", 0, None)
    finally:
        await server.stop(None)


async def test_a_whole_answer_is_a_record_of_its_tokens() -> None:
    record = await answered_by(WHOLE)
    assert (record.error_message, record.token_ids) == ("", (7, 8) * 3)


@pytest.mark.parametrize("at", range(len(WHOLE)))
@pytest.mark.parametrize(("messages", "words"), [([], "something was lost on the way"), ([b"\xff"], "cannot be read")])
async def test_an_answer_with_a_gap_is_a_failure(at: int, messages: list[bytes], words: str) -> None:
    """An answer that lacks a message is a failure: a shorter answer would seem faster.

    Message number `at` of the answer is replaced by `messages`; the error has `words`.

    Proxies have dropped whole messages.
    """
    record = await answered_by([*WHOLE[:at], *messages, *WHOLE[at + 1 :]])
    assert record.error_code == "UNAVAILABLE"
    assert words in record.error_message
