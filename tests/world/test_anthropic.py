"""Tests of Anthropic's own client in whole loops: ask, call a tool, send the client's messages back, ask again.

The server has the models in this repository, which never learned tools: a grammar forces the calls.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec.inference.serving.processes import free_port
from tests.support.servers import fused_server, until_healthy
from tests.support.tools import WEATHER, Forecast
from tests.world import packages

pytestmark = [pytest.mark.world, pytest.mark.asyncio(loop_scope="module")]

USER: Any = {"role": "user", "content": "Will it rain?"}
FIELDS: Any = {"model": "target", "max_tokens": 48, "extra_body": {"temperature": 0}}
"""Common fields of the requests; temperature is in `extra_body`, as the client's own arguments lack it."""
TOOLS: Any = [{"name": "weather", "description": "How the weather will be.", "input_schema": WEATHER}]
ONE_CALL: Any = {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
CACHED: Any = {"type": "ephemeral"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncGenerator[Any, None]:
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(packages.python()))
        anthropic: Any = importlib.import_module("anthropic")
        async with fused_server(BUNDLED_TARGET, BUNDLED_DRAFT, "--http_port", str(port), "--batch", "2"):
            await until_healthy(port)
            url = f"http://127.0.0.1:{port}"
            async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
                yield client


async def answered(client: Any, stream: bool, **fields: Any) -> Any:
    """Return an answer as the client's Message: whole, or put together from a stream by the client's helper."""
    if not stream:
        return await client.messages.create(**FIELDS | fields)
    async with client.messages.stream(**FIELDS | fields) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text(client: Any, stream: bool) -> None:
    message = await answered(client, stream, messages=[USER], system="Be short.")
    (block,) = message.content
    assert (message.role, message.model, block.type) == ("assistant", "target", "text")
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 48
    again = await answered(client, not stream, messages=[USER], system=[{"type": "text", "text": "Be short."}])
    assert again.content[0].text == block.text
    usages = [each.usage.input_tokens + each.usage.cache_read_input_tokens for each in (message, again)]
    counted = await client.messages.count_tokens(model="target", messages=[USER], system="Be short.")
    assert usages == [counted.input_tokens] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_loop_with_a_tool(client: Any, stream: bool, choice: Any) -> None:
    """A tool call, its result and the next answer work in one conversation.

    The client's messages may be sent back as objects or as dictionaries.
    """
    choice = {**choice, "disable_parallel_tool_use": True}
    message = await answered(client, stream, messages=[USER], tools=TOOLS, tool_choice=choice)
    (call,) = message.content
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert 1 <= call.input["days"] <= 9
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": content, "is_error": False}
        for content in ("rain", [{"type": "text", "text": "rain", "cache_control": CACHED}])
    ]
    sent = (
        message.content,
        [each.model_dump() for each in message.content],
        [each.to_dict() for each in message.content],
    )
    texts, numbers = set(), set()
    for content in sent:
        for result in results:
            turns = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
            after = await answered(
                client, stream, messages=turns, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=4
            )
            texts.add("".join(block.text for block in after.content))
            numbers.add(after.usage.input_tokens + after.usage.cache_read_input_tokens)
    assert (len(texts), len(numbers)) == (1, 1)


async def test_events_come_in_anthropics_order(client: Any) -> None:
    events = await client.messages.create(**FIELDS, **ONE_CALL, messages=[USER], stream=True)
    kinds = [each.type async for each in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    start, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert kinds == [*start, *["content_block_delta"] * deltas, *end]


async def test_the_clients_own_loop_over_tools(client: Any) -> None:
    """The client's tool runner works: it calls a Python function, sends the result back, and ends if no call comes."""
    anthropic: Any = importlib.import_module("anthropic")
    called: list[int] = []

    async def forecast(days: int) -> str:
        called.append(days)
        return "rain"

    weather = anthropic.beta_async_tool(forecast, name="weather", description="How it will be.", input_schema=WEATHER)
    runner = client.beta.messages.tool_runner(
        **FIELDS, messages=[USER], tools=[weather], tool_choice=ONE_CALL["tool_choice"], max_iterations=2
    )
    messages = [each async for each in runner]
    assert [each.stop_reason for each in messages] == ["tool_use", "tool_use"]
    assert called
    assert all(1 <= each <= 9 for each in called)


async def test_typed_output(client: Any) -> None:
    message = await client.messages.parse(**FIELDS | {"max_tokens": 80}, messages=[USER], output_format=Forecast)
    assert isinstance(message.parsed_output, Forecast)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(client: Any, stream: bool) -> None:
    whole = await answered(client, stream, messages=[USER])
    text = whole.content[0].text
    stop = text[8:12]
    message = await answered(client, stream, messages=[USER], stop_sequences=["never said", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in message.content) == text.partition(stop)[0]


async def test_a_request_as_claude_code_writes_it(client: Any) -> None:
    """A request as Claude Code writes it is answered: cached system blocks, beta features, and unknown fields."""
    request: Any = {
        "system": [
            {"type": "text", "text": each, "cache_control": CACHED} for each in ("You are a tool.", "Be short.")
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Rain?", "cache_control": CACHED}]}],
        "metadata": {"user_id": "user_1"},
        "tools": [{**TOOLS[0], "cache_control": CACHED, "eager_input_streaming": True}],
        "thinking": {"type": "adaptive"},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        "extra_body": {
            "temperature": 1,
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        },
    }
    async with client.beta.messages.stream(**FIELDS | request) as stream:
        message = await stream.get_final_message()
    assert message.stop_reason in ("end_turn", "max_tokens")
    del request["metadata"]
    assert (await client.beta.messages.count_tokens(model="target", **request)).input_tokens > 10


async def test_errors_are_the_clients_own(client: Any) -> None:
    anthropic: Any = importlib.import_module("anthropic")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(
        anthropic.BadRequestError, match="a block of type image is not supported here: this model reads"
    ):
        await client.messages.create(**FIELDS, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.NotFoundError, match="model claude does not exist; target is served") as found:
        await client.messages.create(**FIELDS | {"model": "claude"}, messages=[USER])
    assert found.value.body["type"] == "error"
    assert found.value.body["error"]["type"] == "not_found_error"
