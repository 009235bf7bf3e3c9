"""Tests that clients which know several servers still get the right answer if one dies or shuts down meanwhile.

Real processes over real sockets. The tests run in this order, since each ends a server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from specdec.inference.commit import Delta
from specdec.inference.config import ConnectionConfig
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import ServerProcess, free_port, server_process
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support.servers import complete, pieces_over_http, run_command, target_server

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUM_TOKENS = 400
FLAGS = ("--sequence_length", "8192", "--batch", "8")
REQUEST = CompletionRequest("the wind", SamplingParams(temperature=0.8), seed=3, max_new_tokens=NUM_TOKENS)
BODY = {"prompt": "the wind", "seed": 3, "temperature": 0.8, "max_tokens": NUM_TOKENS}
GRACE_S = 60.0


@dataclass(frozen=True)
class Cluster:
    """Several targets with the same model, and the HTTP port of a gateway in front of them."""

    targets: list[ServerProcess]
    port: int

    @property
    def where(self) -> str:
        return where_of(self.targets)


def where_of(targets: Iterable[ServerProcess]) -> str:
    return ",".join(target.address for target in targets)


def gateway(targets: Iterable[ServerProcess], port: int) -> AbstractAsyncContextManager[ServerProcess]:
    flags = ("--target_host", where_of(targets), "--http_port", str(port))
    return server_process("gateway", "gateway", *flags, port=port, ready_line="HTTP on")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(models: ModelDirectories) -> AsyncGenerator[Cluster, None]:
    async with AsyncExitStack() as stack:
        servers = [target_server(models.endless, *FLAGS, "--grace_s", f"{GRACE_S:g}") for _ in range(3)]
        targets = list(await asyncio.gather(*map(stack.enter_async_context, servers)))
        port = free_port()
        await stack.enter_async_context(gateway(targets, port))
        yield Cluster(targets, port)


async def over_http(port: int) -> str:
    """Send the request BODY to the gateway at this port, streamed; return the answer's whole text."""
    return "".join([piece async for piece in pieces_over_http(port, BODY)])


async def test_a_draining_targets_streams_move(cluster: Cluster) -> None:
    """When a target shuts down, its streams go on at others, so that it ends before they do; no token changes."""
    ending, others = cluster.targets[2], cluster.targets[:2]
    request = replace(REQUEST, max_new_tokens=8000)
    connection = ConnectionConfig(cluster.where, 1, 60.0)
    ended = asyncio.Event()
    async with connected(connection) as fleet:
        completer = FailoverCompleter(fleet, connection)

        async def stream() -> list[int]:
            """Read an answer until 20 messages with tokens after the target has ended; return its tokens so far."""
            token_ids: list[int] = []
            num_more = 20
            async with aclosing(completer.complete(request)) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        token_ids += event.token_ids
                        begun.release()
                        num_more -= ended.is_set()
                    if not num_more:
                        return token_ids
            raise AssertionError("the answer was done before the server had ended")

        async with aclosing(fleet.serves()) as changes:  # else all requests might go to the first to be ready
            async for _ in changes:
                if all(record.ready for record in fleet._policy.records.values()):
                    break
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(stream()) for _ in range(6)]
        for _ in range(200):
            await begun.acquire()
        assert fleet._policy.records[ending.address].num_outstanding
        ending.process.terminate()
        async with asyncio.timeout(GRACE_S / 2):
            assert await ending.process.wait() == 0, ending.log_tail(20)
        ended.set()
        answers = await asyncio.gather(*streams)
    longest = max(map(len, answers))
    expected = await complete(others[0], replace(request, max_new_tokens=longest))
    for token_ids in answers:
        assert token_ids == expected.token_ids[: len(token_ids)]


async def test_a_target_is_killed_under_clients_of_every_kind(cluster: Cluster, models: ModelDirectories) -> None:
    """When a target is killed, all clients get whole answers from another one, with the same tokens.

    They are clients without a draft, clients of a gateway, and a command with a draft model, started before.
    """
    targets, port = cluster.targets[:2], cluster.port
    where = where_of(targets)
    expected = await complete(targets[0], REQUEST)
    asked = ("--prompt", "the wind", "--seed", "3", "--temperature", "0.8", "--max_new_tokens", str(NUM_TOKENS))
    line = ("--target_host", where, *asked, "--format", "json")
    own = ("--role", "draft", "--model", models.endless, "--threads", "1", "--sequence_length", "2048", *line)
    lines = [asyncio.create_task(run_command(*own))]
    connection = ConnectionConfig(where, 1, 60.0)
    async with connected(connection) as fleet:
        completer, strike_at, num_tokens = FailoverCompleter(fleet, connection), random.randrange(5, 800), 0

        async def stream() -> str:
            nonlocal num_tokens
            text = ""
            async for event in completer.complete(REQUEST):
                if isinstance(event, Delta):
                    text += event.text
                    num_tokens += len(event.token_ids)
                    if num_tokens >= strike_at and targets[0].process.returncode is None:
                        targets[0].process.kill()
            return text

        texts = await asyncio.gather(*(stream() for _ in range(4)), over_http(port), over_http(port))
    assert targets[0].process.returncode is not None
    assert texts == [expected.text] * 6, f"killed at token {strike_at}"
    for result in await asyncio.gather(*lines):
        assert result.code == 0, result.stderr
        assert result.objects[0]["token_ids"] == expected.token_ids
