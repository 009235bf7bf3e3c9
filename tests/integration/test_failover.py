"""A server dies in the middle of answers: every client that has another one gets the undisturbed answer.

Real processes over real sockets; `python -m benchmarks.failover` is the long form.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from inference.commit import Delta
from inference.config import ConnectionConfig
from inference.request import SamplingParams
from inference.serving.processes import ServerProcess, free_port, server_process
from inference.workers.completion import CompletionRequest
from inference.workers.failover import FailoverCompleter
from inference.workers.fleet import connected
from tests.conftest import ModelDirectories
from tests.support.servers import complete, run_command, target_server

pytestmark = pytest.mark.slow

NUM_TOKENS = 400
FLAGS = ("--sequence_length", "2048", "--batch", "8")
REQUEST = CompletionRequest("the wind", SamplingParams(temperature=0.8), seed=3, max_new_tokens=NUM_TOKENS)
BODY = {"prompt": "the wind", "seed": 3, "temperature": 0.8, "max_tokens": NUM_TOKENS, "stream": True}


@asynccontextmanager
async def replicas(models: ModelDirectories) -> AsyncGenerator[tuple[list[ServerProcess], int], None]:
    """Two targets, and the port of a gateway in front of them."""
    async with AsyncExitStack() as stack:
        servers = [target_server(models.endless, *FLAGS) for _ in range(2)]
        targets = list(await asyncio.gather(*map(stack.enter_async_context, servers)))
        port, where = free_port(), ",".join(target.address for target in targets)
        flags = ("--target_host", where, "--http_port", str(port))
        gateway = server_process("gateway", "gateway", *flags, port=port, ready_line="HTTP on")
        await stack.enter_async_context(gateway)
        yield targets, port


async def over_http(port: int) -> str:
    """The answer of the gateway."""
    text = ""
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client,
        client.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


async def test_a_target_is_killed_under_clients_of_every_kind(models: ModelDirectories) -> None:
    """Thin clients, a gateway, and a draft of its own; the command line may come before or behind the kill."""
    async with replicas(models) as (targets, port):
        where = ",".join(target.address for target in targets)
        expected = await complete(targets[0], REQUEST)
        asked = ("--prompt", "the wind", "--seed", "3", "--temperature", "0.8", "--max_new_tokens", str(NUM_TOKENS))
        line = ("--target_host", where, *asked, "--format", "json")
        own = ("--role", "draft", "--model", models.endless, "--threads", "1", "--sequence_length", "2048", *line)
        lines = [asyncio.create_task(run_command(*own))]
        connection = ConnectionConfig(where, 1)
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
