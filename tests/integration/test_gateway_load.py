"""Hundreds of streams at once at a server with few slots."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.conftest import ModelDirectories
from tests.integration.test_gateway import gateway_process, metrics_of, until_running, value
from tests.support.servers import fused_server

pytestmark = pytest.mark.long

NUM_STREAMS, NUM_LEAVERS, NUM_SLOTS, MAX_WAITING, NUM_TOKENS = 200, 20, 4, 120, 8


async def outcome(client: httpx.AsyncClient, number: int) -> str:
    """Return the status of one streaming request; check that an accepted one is complete."""
    body = {"prompt": f"story {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            return "refused"
        assert response.status_code == 200, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert [json.loads(line)["choices"][0]["finish_reason"] for line in lines] == [None] * (NUM_TOKENS - 1) + ["length"]
    return "finished"


async def left(client: httpx.AsyncClient, number: int) -> str:
    """Send a streaming request, and disconnect before or after its first event."""
    body = {"prompt": f"story {number}", "max_tokens": 100, "ignore_eos": True, "stream": True}
    try:
        async with (
            asyncio.timeout(0.05 + number / 100),
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            await anext(response.aiter_lines())
    except TimeoutError:
        pass
    return "left"


async def test_every_stream_ends_or_is_refused_with_a_time_to_retry(models: ModelDirectories) -> None:
    """Each of many streams ends or is refused with a time to retry, and no slot is lost when clients disconnect."""
    flags = ("--batch", str(NUM_SLOTS), "--max_waiting", str(MAX_WAITING))
    limits = httpx.Limits(max_connections=NUM_STREAMS + 50)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(fused_server(models.target, models.related, *flags))
        port = await stack.enter_async_context(gateway_process(server))
        url = f"http://127.0.0.1:{port}"
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, limits=limits, timeout=60))
        streams = (outcome(client, number) for number in range(NUM_STREAMS))
        leavers = (left(client, number) for number in range(NUM_LEAVERS))
        ends = Counter(await asyncio.gather(*streams, *leavers))
        assert ends["finished"] >= NUM_SLOTS
        assert ends.total() == NUM_STREAMS + NUM_LEAVERS
        await until_running(port, 0)
        exposition = await metrics_of(port)
        assert value(exposition, "vllm:num_requests_waiting") == 0
        assert value(exposition, "vllm:request_success_total") >= ends["finished"]
        for number in range(2 * NUM_SLOTS):  # every slot is free again
            assert await outcome(client, number) == "finished"
