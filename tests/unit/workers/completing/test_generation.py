"""GenerationService: calls GetLoad and Drain, and the memory limit of log-probabilities that clients do not read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.commit import Started, TokenLogprobs
from specdec.inference.config import PortSecurity, ServerConfig
from specdec.inference.errors import CapacityError
from specdec.inference.serving.host import Host
from specdec.inference.workers.completing import generation
from specdec.inference.workers.completing.generation import GenerationServicer, Operation, ScoreWriter
from tests.support.completers import CARD, ScriptedCompleter
from tests.support.ports import listening
from tests.support.scripted import until
from tests.unit.serving.test_host import Recorder


@dataclass
class Load:
    """Load of a server with four slots, all of which run requests, while two requests wait."""

    num_slots: int = 4
    num_running: int = 4
    num_waiting: int = 2


async def test_a_drain_call_returns_the_load() -> None:
    operation, work = Operation(Load(), may_drain=True), Recorder()
    work.may_end.clear()
    host = asyncio.create_task(Host(work, config=ServerConfig(), operation=operation).run())
    service = GenerationServicer(ScriptedCompleter([]), CARD, None, operation)
    async with listening(service) as server, open_channel(f"127.0.0.1:{server.port}") as channel, asyncio.timeout(60):
        stub = rpc.GenerationServiceStub(channel)
        load = await stub.GetLoad(pb.GetLoadRequest())
        assert load == pb.GetLoadResponse(num_slots=4, num_running=4, num_waiting=2)
        await stub.Drain(pb.DrainRequest())
        await until(lambda: bool(work.told))
        assert (await stub.GetLoad(pb.GetLoadRequest())).draining
        await stub.Drain(pb.DrainRequest())
        work.may_end.set()
        await host


@pytest.mark.parametrize("operation", [None, Operation(Load(), may_drain=False)])
async def test_a_call_without_a_way_to_end_the_server_is_refused(operation: Operation | None) -> None:
    front = GenerationServicer(ScriptedCompleter([]), CARD, None, operation)
    async with listening(front) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await rpc.GenerationServiceStub(channel).Drain(pb.DrainRequest())
    code = grpc.StatusCode.NOT_FOUND if operation is None else grpc.StatusCode.PERMISSION_DENIED
    assert refusal.value.code() == code


def test_off_loopback_the_auth_file_names_those_that_may(tmp_path: Path) -> None:
    assert ServerConfig().ends_by_call
    assert not ServerConfig("0.0.0.0", security=PortSecurity(insecure=True)).ends_by_call
    assert ServerConfig("0.0.0.0", security=PortSecurity(insecure=True, auth_file=tmp_path)).ends_by_call


SCORES = (TokenLogprobs((1, 2, 3), (-1.0, -2.0, -3.0)),) * 4


class Peer:
    """Stand-in for a gRPC peer: if `reads` is False, each write of a message to it waits for ever."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = asyncio.Event()
        if reads:
            self._reads.set()
        self.messages: list[Any] = []

    async def write(self, message: Any) -> None:
        self.messages.append(message)
        await self._reads.wait()


def writing(writer: ScoreWriter, peer: Any, scores: tuple[TokenLogprobs, ...] = SCORES) -> asyncio.Task[None]:
    return asyncio.create_task(writer.write(peer, Started(1, 1, prompt_logprobs=scores)))


async def test_a_call_beyond_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is refused if unread answers with prompt log-probabilities would take too much memory.

    Regression: hundreds of unread answers of 16 MB could stay in memory, since such calls hold no slot.
    """
    monkeypatch.setattr(generation, "MAX_UNREAD_SCORES", 30)
    writer, deaf, good = ScoreWriter(), Peer(reads=False), Peer(reads=True)
    unread = [writing(writer, deaf), writing(writer, deaf)]
    await until(lambda: len(deaf.messages) == 2)
    with pytest.raises(CapacityError, match=r"24 of this server wait to be read \(limit 30\)"):
        await writing(writer, good)
    await writing(writer, good, ())  # a call that wants none is not concerned
    unread[0].cancel()
    await asyncio.wait(unread[:1])
    await writing(writer, good)
    assert [len(each.started.prompt_logprobs) for each in good.messages] == [0, len(SCORES)]
    unread[1].cancel()


async def test_a_call_alone_has_room_for_any_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_UNREAD_SCORES", 5)
    peer = Peer(reads=True)
    await writing(ScoreWriter(), peer)
    assert len(peer.messages) == 1
