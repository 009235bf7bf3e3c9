"""Load and drain of a server, which operators request by gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.server import Server
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.config import PortSecurity, ServerConfig
from specdec.inference.serving.fronts import GrpcFront
from specdec.inference.serving.host import Host
from specdec.inference.workers.calls.status import to_status
from specdec.inference.workers.completing.generation import GenerationServicer, Operation
from tests.support.completers import CARD, ScriptedCompleter
from tests.support.ports import listening


@dataclass
class Load:
    """Load of a server with six sessions and four slots."""

    num_slots: int = 4
    num_running: int = 4
    num_waiting: int = 2


class Slow:
    """Work of a host that never ends."""

    fault = broken = None
    hangs = False

    def __init__(self) -> None:
        self.stopping, self.ended = asyncio.Event(), asyncio.Event()

    async def stop(self, *, grace_s: float) -> None:
        self.stopping.set()
        await self.ended.wait()


class Front(Server):
    """`Front` of a host: a gRPC port over a scripted completer."""

    ports = GrpcFront.ports

    def __init__(self, operation: Operation | None) -> None:
        servicer = GenerationServicer(ScriptedCompleter([]), CARD, None, operation)
        super().__init__("127.0.0.1:0", [servicer], status_of=to_status)


async def test_a_drain_call_returns_the_load() -> None:
    operation, work = Operation(Load(), may_drain=True), Slow()
    front = Front(operation)
    host = asyncio.create_task(Host(work, [front], config=ServerConfig(), operation=operation).run())
    async with open_channel(f"127.0.0.1:{front.port}") as channel, asyncio.timeout(60):
        stub = rpc.GenerationServiceStub(channel)
        load = await stub.GetLoad(pb.GetLoadRequest(), wait_for_ready=True)
        assert load == pb.GetLoadResponse(num_slots=4, num_running=4, num_waiting=2)
        await stub.Drain(pb.DrainRequest())
        await work.stopping.wait()
        assert (await stub.GetLoad(pb.GetLoadRequest())).draining
        await stub.Drain(pb.DrainRequest())
        work.ended.set()
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
