"""An event passes through few functions between engine and client, so that newcomers can follow it."""

from __future__ import annotations

import traceback
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.commit import TokenEvent
from specdec.inference.config import ConnectionConfig, PortSecurity
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import TargetEngine
from specdec.inference.engine.target_session import CommitQueue
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.calls.convert import event_from_message
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.local import LocalCompleter
from tests.support.models import tiny_model, tiny_tokenizer
from tests.support.ports import served

ROOT = Path(__file__).parents[3]
GATEWAY = ["stream.py:chunks", "requests.py:events_of", "scope.py:complete", "resuming.py:events", "remote.py:complete"]
TARGET = [
    "guard.py:guard",
    "generation.py:Generate",
    "scope.py:complete",
    "local.py:complete",
    "pool.py:generate",
    "target.py:answer",
    "target_session.py:get",
]


def our_frames() -> list[str]:
    """Return this project's functions on the call stack, outermost first, as file:function."""
    rooms = tuple(str(ROOT / "specdec" / room) for room in ("inference", "grpc_comm"))
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(rooms)]
    return [f"{Path(frame.filename).name}:{frame.name}" for frame in frames]


@pytest.fixture
async def gateway() -> AsyncGenerator[str, None]:
    """Start a gateway in front of a target, over real sockets; yield its URL."""
    async with AsyncExitStack() as stack:
        backend = TorchBackend(tiny_model("llama", seed=1), num_slots=2, max_length=64)
        engine = await stack.enter_async_context(running(TargetEngine(SlotDecoder(backend))))
        local = LocalCompleter(DraftPool(engine), Tokenizer(tiny_tokenizer(), frozenset()))
        target = await stack.enter_async_context(served(PortSecurity(), local))
        link = ConnectionConfig("127.0.0.1", target.grpc, 60.0)
        fleet = await stack.enter_async_context(connected(link))
        at = await stack.enter_async_context(served(PortSecurity(), FailoverCompleter(fleet, link)))
        yield f"http://127.0.0.1:{at.http}"


async def test_an_event_passes_few_functions(gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of an answer passes through few functions on its way to the client.

    Regression: an event passed 9 functions of a gateway and 10 of a target, with two nested waits.
    """
    at_gateway: list[list[str]] = []
    at_target: list[list[str]] = []
    get = CommitQueue.get

    def converted(message: Any) -> Any:
        at_gateway.append([frame for frame in our_frames() if not frame.endswith(":converted")])  # returns at once
        return event_from_message(message)

    async def gotten(self: CommitQueue) -> TokenEvent:
        event = await get(self)
        at_target.append([*our_frames(), "target_session.py:get"])
        return event

    monkeypatch.setattr("specdec.inference.workers.completing.remote.event_from_message", converted)
    monkeypatch.setattr(CommitQueue, "get", gotten)
    body = {"prompt": "the wind", "max_tokens": 8, "stream": True}
    async with httpx.AsyncClient(base_url=gateway, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert at_gateway[-2] == GATEWAY
    assert at_target[-2] == TARGET
