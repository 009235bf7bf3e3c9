"""Tests of clients of OpenAI's Responses API by other projects, at a server with the models in this repository."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
import pytest_asyncio

from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec.inference.serving.processes import free_port
from tests.support.servers import fused_server, until_healthy
from tests.support.tools import WEATHER, Forecast, agent_runs, response_tool

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

FUNCTION: Any = response_tool("weather", WEATHER, strict=True)
FIELDS: Any = {"model": "target", "input": "Will it rain?", "max_output_tokens": 40, "temperature": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncGenerator[str, None]:
    port = free_port()
    async with fused_server(BUNDLED_TARGET, BUNDLED_DRAFT, "--http_port", str(port), "--batch", "4"):
        await until_healthy(port)
        yield f"http://127.0.0.1:{port}/v1"


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def test_the_text_is_that_of_a_chat_whole_and_streamed(client: Any) -> None:
    whole = await client.responses.create(**FIELDS, instructions="Help.")
    events = [event async for event in await client.responses.create(**FIELDS, instructions="Help.", stream=True)]
    assert events[-1].type == "response.incomplete", "the limit of tokens ends it"
    streamed = events[-1].response
    messages: Any = [{"role": "system", "content": "Help."}, {"role": "user", "content": FIELDS["input"]}]
    chat = await client.chat.completions.create(model="target", messages=messages, max_tokens=40, temperature=0)
    assert whole.output_text == streamed.output_text == chat.choices[0].message.content
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert json.loads(whole.model_dump_json())["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


async def test_a_call_goes_back_into_the_conversation(client: Any) -> None:
    fields: Any = {**FIELDS, "tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}
    first = await client.responses.create(**fields)
    (call,) = first.output
    assert call.type == "function_call"
    assert 1 <= json.loads(call.arguments)["days"] <= 9
    async with client.responses.stream(**fields) as stream:
        (other,) = (await stream.get_final_response()).output
    assert other.type == "function_call"
    assert other.arguments == call.arguments
    answered = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items: Any = [{"role": "user", "content": "Rain?"}, call.model_dump(), answered]
    second = await client.responses.create(**{**fields, "input": items, "tool_choice": "none"})
    assert [item.type for item in second.output] == ["message"]


async def test_responses_parse_into_a_pydantic_model(client: Any) -> None:
    parsed = await client.responses.parse(**{**FIELDS, "max_output_tokens": 80}, text_format=Forecast)
    assert isinstance(parsed.output_parsed, Forecast)


async def test_openai_agents(client: Any) -> None:
    """Agents of OpenAI's Agents SDK work over the Responses API.

    One calls a tool, whole and streamed; another gives an answer in the type Forecast.
    """
    from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner

    model, config = OpenAIResponsesModel("target", client), RunConfig(tracing_disabled=True)
    result, streaming, kinds = await agent_runs(model, tool_use_behavior="stop_on_first_tool")
    assert result.final_output == streaming.final_output == "rain"
    assert kinds == ["tool_called", "tool_output"]
    writer: Agent[None] = Agent(
        name="b", model=model, model_settings=ModelSettings(max_tokens=80, temperature=0.0), output_type=Forecast
    )
    answer = await Runner.run(writer, result.to_input_list(), run_config=config)
    assert isinstance(answer.final_output, Forecast)


@pytest.mark.release
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
async def test_langchain(url: str, method: Any) -> None:
    from langchain_openai import ChatOpenAI

    fields: Any = {"model": "target", "base_url": url, "api_key": "none", "max_retries": 0, "use_responses_api": True}
    model = ChatOpenAI(**fields, max_tokens=80, temperature=0)
    answer = await asyncio.wait_for(model.with_structured_output(Forecast, method=method).ainvoke("Rain?"), 60)
    assert isinstance(answer, Forecast)
    whole: Any = await model.ainvoke("Rain?")
    streamed = [chunk async for chunk in model.astream("Rain?")]
    assert whole.text == "".join(chunk.text for chunk in streamed)
    assert whole.usage_metadata["output_tokens"] == 80


@pytest.mark.release
async def test_pydantic_ai(url: str, client: Any) -> None:
    """Pydantic AI, which uses the Responses API for OpenAI models, works with tools, a typed output and a stream."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    model = models.OpenAIResponsesModel("target", provider=providers.OpenAIProvider(openai_client=client))
    settings = {"max_tokens": 80, "temperature": 0.0}
    typed = pydantic_ai.Agent(model, output_type=Forecast, instructions="Help.", model_settings=settings)
    assert isinstance((await typed.run("Rain?")).output, Forecast)
    native = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Forecast), model_settings=settings)
    assert isinstance((await native.run("Rain?")).output, Forecast)
    plain = pydantic_ai.Agent(model, instructions="Help.", model_settings=settings)
    whole = await plain.run("Rain?")
    async with plain.run_stream("Rain?") as streamed:
        assert await streamed.get_output() == whole.output
    again = await plain.run("And then?", message_history=whole.all_messages())
    assert again.usage.input_tokens > whole.usage.input_tokens


@pytest.mark.release
async def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    fields = {**FIELDS, "model": "openai/target", "api_base": url, "api_key": "none"}
    whole = await litellm.aresponses(**fields)
    (message,) = whole.output
    stream = await litellm.aresponses(**fields, stream=True)
    deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == message.content[0].text
    called = await litellm.aresponses(**fields, tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False)
    assert 1 <= json.loads(called.output[0].arguments)["days"] <= 9
