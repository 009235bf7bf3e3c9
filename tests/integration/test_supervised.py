"""Tests of servers under a supervisor, such as Ray, Kubernetes or a script; real processes on free ports.

A supervisor reads a server's ports from one line of its output, writes them to a file that clients follow, asks for the
server's load, and drains it. A server ends when its supervisor ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.config import ROOT
from tests.conftest import ModelDirectories
from tests.support.scripted import until
from tests.support.servers import ENVIRONMENT, load_of, pieces_over_http

pytestmark = pytest.mark.long

NUM_TOKENS = 600
BODY = {"prompt": "the wind", "seed": 3, "temperature": 0.8, "max_tokens": NUM_TOKENS}
FLAGS = ("--threads", "1", "--sequence_length", "2048")


@dataclass(frozen=True)
class Child:
    """A server's process, the ports that it reported at its start, by what they serve (such as grpc), and its log."""

    process: asyncio.subprocess.Process
    ports: dict[str, int]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['grpc']}"

    async def ended(self) -> int:
        async with asyncio.timeout(60):
            return await self.process.wait()

    async def until_logged(self, text: str, times: int = 1) -> None:
        await until(lambda: self.said.count(text) >= times)


@asynccontextmanager
async def child(log: Path, *arguments: str | Path) -> AsyncGenerator[Child, None]:
    """Start a server that ends when its standard input is closed.

    Yield it once it has reported its ports in a line of JSON.
    """
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "main.py"), *map(str, arguments), "--lifeline", "stdin", "--ready_json"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=ENVIRONMENT,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(90):
                line = json.loads(await process.stdout.readline() or "null")
            assert line is not None, "it ended without a line"
            assert (line["ready"], line["pid"], line["host"]) == (True, process.pid, "127.0.0.1")
            yield Child(process, line["ports"], log)
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


def put(path: Path, *children: Child) -> None:
    part = path.with_suffix(".part")
    part.write_text("".join(f"{each.address}\n" for each in children))
    part.replace(path)


async def drain(address: str) -> None:
    async with open_channel(address) as channel:
        await rpc.GenerationServiceStub(channel).Drain(pb.DrainRequest())


async def test_targets_change_by_file_and_call(models: ModelDirectories, tmp_path: Path) -> None:
    target = ("--role", "target", "--model", models.endless, *FLAGS, "--port", "0")
    every_port = ("--http_port", "0", "--metrics_port", "0", "--probe_port", "0")
    draft = ("--role", "draft", "--model", models.endless, *FLAGS, "--insecure")
    gateway = ("--role", "gateway", "--http_port", "0", "--insecure")
    path = tmp_path / "targets"
    async with AsyncExitStack() as stack:

        async def start(name: str, *flags: str | Path) -> Child:
            return await stack.enter_async_context(child(tmp_path / name, *flags))

        first, second = await asyncio.gather(start("first", *target, *every_port), start("second", *target))
        assert set(first.ports) == {"grpc", "http", "metrics", "probes"}
        assert len(set(first.ports.values()) - {0}) == 4
        put(path, first)
        worker, front = await asyncio.gather(
            start("worker", *draft, "--attach", f"file://{path}"),
            start("front", *gateway, "--target_host", f"file://{path}"),
        )
        assert worker.ports == {}
        assert set(front.ports) == {"http"}
        await worker.until_logged("attached as")
        expected = "".join([piece async for piece in pieces_over_http(first.ports["http"], BODY)])
        # 1. Another target joins: the worker attaches there, and stays where it is.
        put(path, first, second)
        await worker.until_logged("attached as", times=2)
        await front.until_logged("the servers are now")
        # 2. The one that answers gets a call of Drain: the answer goes on at the other, unless it has ended before.
        pieces: list[str] = []

        async def read() -> None:
            async for piece in pieces_over_http(front.ports["http"], BODY):
                pieces.append(piece)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            await until(lambda: bool(pieces))
            load = await load_of(first.address)
            assert (load.num_slots, load.draining) == (8, False)
            busy, other = (first, second) if load.num_running else (second, first)
            await drain(busy.address)
            assert await busy.ended() == 0
            put(path, other)
        assert "a call of Drain: running requests get 10 s" in busy.said
        assert "".join(pieces) == expected


async def test_a_closed_stdin_ends_the_process(models: ModelDirectories, tmp_path: Path) -> None:
    async with child(tmp_path / "log", "--role", "target", "--model", models.endless, *FLAGS, "--port", "0") as server:
        assert server.process.stdin is not None
        server.process.stdin.write(b"words mean nothing\n")
        await server.process.stdin.drain()
        assert not (await load_of(server.address)).draining
        server.process.stdin.close()
        assert await server.ended() == 0
        assert "the end of stdin: running requests get 10 s" in server.said
