"""Tests of other projects' clients that call tools; the bundled model never learned tools, so a grammar forces calls.

A target and a gateway run in this process, over real sockets.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.server import Server
from specdec.inference.config import BUNDLED_TARGET, HttpConfig, ModelConfig, ServerConfig
from specdec.inference.engine.target import EngineLimits
from specdec.inference.gateway.app import Gateway, HttpFront
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import NO_DEFAULTS
from specdec.inference.serving.assembly import model_card, target_engine
from specdec.inference.serving.host import opened
from specdec.inference.serving.processes import free_port
from specdec.inference.workers.calls.status import to_status
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.remote import RemoteCompleter
from tests.support.completers import healthy
from tests.support.tools import WEATHER, agent_runs, tool

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TOOLS: Any = [tool("weather", WEATHER, description="How the weather will be."), tool("now", None)]
MESSAGES: Any = [{"role": "user", "content": "Will it rain?"}]
FIELDS: Any = {"model": "target", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 48, "seed": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncGenerator[str, None]:
    """Start a target, and a gateway that has only the target's description of its model; yield the gateway's URL."""
    model = ModelConfig(BUNDLED_TARGET, num_slots=4, num_threads=1)
    async with target_engine(model, EngineLimits(16)) as loaded:
        completer = LocalCompleter(loaded.engine, loaded.tokenizer)
        card = model_card("target", "target", loaded.engine, loaded.tokenizer, NO_DEFAULTS)
        service = GenerationServicer(completer, card, completer.codec)
        server = Server("127.0.0.1:0", [service], status_of=to_status)
        await server.open()
        address, port = f"127.0.0.1:{server.port}", free_port()
        async with open_channel(address) as channel:
            remote = RemoteCompleter(channel, address, deadline_s=60)
            gateway = Gateway(remote, await remote.model(), Metrics("target"), healthy, HttpConfig(port), codec=remote)
            async with opened(HttpFront(gateway, ServerConfig(grace_s=1.0))):
                yield f"http://127.0.0.1:{port}/v1"
        await server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(url: str) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def check(name: str, arguments: str) -> None:
    (schema,) = (each["function"]["parameters"] for each in TOOLS if each["function"]["name"] == name)
    jsonschema.validate(json.loads(arguments), schema or {"additionalProperties": False})


NOW: Any = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize("choice", ["required", NOW], ids=["required", "named"])
async def test_required_calls_are_valid_whole_and_streamed(client: Any, choice: Any) -> None:
    fields = {**FIELDS, "tool_choice": choice, "parallel_tool_calls": False}
    whole = (await client.chat.completions.create(**fields)).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    check(call.function.name, call.function.arguments)
    async with client.chat.completions.stream(**fields) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    (other,) = streamed.message.tool_calls or []
    assert (streamed.finish_reason, other.function.name) == ("tool_calls", call.function.name)
    assert other.function.arguments == call.function.arguments


async def test_calls_and_their_answers_go_back_into_the_conversation(client: Any) -> None:
    first = await client.chat.completions.create(**FIELDS, tool_choice=NOW)
    (call,) = first.choices[0].message.tool_calls or []
    answer = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    fields = {**FIELDS, "messages": [*MESSAGES, first.choices[0].message.model_dump(), answer]}
    second = await client.chat.completions.create(**{**fields, "max_tokens": 6}, tool_choice="none")
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens < first.usage.prompt_tokens, "tools that must not be called are not in the prompt"


async def test_a_bad_schema_is_named_by_its_place(client: Any) -> None:
    bad = tool("bad", {"type": "object", "properties": {"a": {"items": {"type": "nonsense"}}}})
    with pytest.raises(
        openai.BadRequestError, match=r"tools\[2\]\.function\.parameters\.properties\.a\.items"
    ) as caught:
        await client.chat.completions.create(**{**FIELDS, "tools": [*TOOLS, bad]}, tool_choice="required")
    assert caught.value.param == "tools"


@pytest.mark.long
async def test_openai_agents_call_a_tool_and_answer(client: Any) -> None:
    """Agents of OpenAI's Agents SDK call a tool, and then answer with its result, both whole and streamed."""
    from agents import OpenAIChatCompletionsModel

    result, streaming, kinds = await agent_runs(OpenAIChatCompletionsModel("target", client))
    assert isinstance(result.final_output, str)
    assert kinds[:2] == ["tool_called", "tool_output"]
    assert streaming.final_output == result.final_output
