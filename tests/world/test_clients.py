"""Real clients in whole loops: ask, call a tool, send back what the client made of the answer, ask again.

They run against a fused server of the bundled pair, which never learned tools: the grammar forces the calls.
"""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec.inference.serving.processes import free_port
from tests.support.servers import fused_server, until_healthy
from tests.support.tools import WEATHER, Forecast, tool
from tests.world import packages

pytestmark = [pytest.mark.world, pytest.mark.asyncio(loop_scope="module")]

USER: Any = {"role": "user", "content": "Will it rain?"}
FIELDS: Any = {"model": "target", "max_tokens": 48, "temperature": 0}
ONE_CALL: Any = {"tool_choice": "required", "parallel_tool_calls": False}


def tools() -> Any:
    """Return a fresh list of tools: LiteLLM changes the one that it gets."""
    return [tool("weather", copy.deepcopy(WEATHER), description="How the weather will be.")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncGenerator[str, None]:
    port = free_port()
    async with fused_server(BUNDLED_TARGET, BUNDLED_DRAFT, "--http_port", str(port), "--batch", "2"):
        await until_healthy(port)
        yield f"http://127.0.0.1:{port}/v1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(url: str) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def plain(message: Any) -> dict[str, Any]:
    """Return an assistant's message with the fields alone that reach a template."""
    calls = [
        {
            "id": each.id,
            "type": "function",
            "function": {"name": each.function.name, "arguments": each.function.arguments},
        }
        for each in message.tool_calls or []
    ]
    return {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}


async def ask_again(client: Any, sent: Any, expected: dict[str, Any]) -> None:
    """Send a client's form of an answer back; check that the prompt is the one of the plain message."""
    answers = [
        {"role": "tool", "tool_call_id": each["id"], "content": "rain"} for each in expected.get("tool_calls", ())
    ]
    fields = {**FIELDS, "max_tokens": 4}
    first, second = [
        await client.chat.completions.create(**fields, messages=[USER, each, *answers, USER])
        for each in (sent, expected)
    ]
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage.prompt_tokens == second.usage.prompt_tokens


async def created(client: Any) -> tuple[list[Any], dict[str, Any]]:
    answer = await client.chat.completions.create(**FIELDS, **ONE_CALL, messages=[USER], tools=tools())
    message = answer.choices[0].message
    return [message, message.model_dump(), message.to_dict()], plain(message)


async def parsed(client: Any) -> tuple[list[Any], dict[str, Any]]:
    functions = [openai.pydantic_function_tool(Forecast)]
    answer = await client.chat.completions.parse(**FIELDS, **ONE_CALL, messages=[USER], tools=functions)
    message = answer.choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Forecast)
    return [message, message.model_dump(), message.to_dict()], plain(message)


async def parsed_json(client: Any) -> tuple[list[Any], dict[str, Any]]:
    answer = await client.chat.completions.parse(**FIELDS, messages=[USER], response_format=Forecast)
    message = answer.choices[0].message
    assert isinstance(message.parsed, Forecast)
    return [message, message.model_dump(), message.to_dict()], plain(message)


async def streamed(client: Any) -> tuple[list[Any], dict[str, Any]]:
    async with client.chat.completions.stream(**FIELDS, **ONE_CALL, messages=[USER], tools=tools()) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    return [message, message.model_dump(), message.to_dict()], plain(message)


async def added_up(client: Any) -> tuple[list[Any], dict[str, Any]]:
    """Add up the deltas of a stream by hand, the index of each call included."""
    message: dict[str, Any] = {}
    stream = await client.chat.completions.create(**FIELDS, **ONE_CALL, messages=[USER], tools=tools(), stream=True)
    async for chunk in stream:
        for name, value in chunk.choices[0].delta.model_dump(exclude_none=True).items() if chunk.choices else ():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            for piece in value:
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    calls.append(piece)
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    (call,) = message["tool_calls"]
    expected = {**call, "function": dict(call["function"])}
    del expected["index"]
    return [message], {"role": "assistant", "content": message.get("content"), "tool_calls": [expected]}


OPENAI: dict[str, Callable[[Any], Awaitable[tuple[list[Any], dict[str, Any]]]]] = {
    each.__name__: each for each in (created, parsed, parsed_json, streamed, added_up)
}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("name", OPENAI)
async def test_openai(client: Any, name: str) -> None:
    """Messages of openai's helpers, as objects and as dictionaries.

    Regression: `parsed`, `parsed_arguments`, and the `index` that a stream must send, were unknown fields.
    """
    sent, expected = await OPENAI[name](client)
    for each in sent:
        await ask_again(client, each, expected)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("stream", [False, True])
async def test_litellm(url: str, client: Any, provider: str, stream: bool) -> None:
    """Regression: LiteLLM's `provider_specific_fields`, which it makes of our own answers, were refused."""
    litellm = pytest.importorskip("litellm")
    fields = {**FIELDS, "model": f"{provider}/target", "api_base": url, "api_key": "none", "num_retries": 0}
    answer = await litellm.acompletion(**fields, **ONE_CALL, messages=[USER], tools=tools(), stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder([each async for each in answer], messages=[USER])
    message = answer.choices[0].message
    (call,) = message.tool_calls
    if provider == "openai":  # for the other, LiteLLM opens the schema's objects
        assert 1 <= json.loads(call.function.arguments)["days"] <= 9
    messages = [USER, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert (
        await litellm.acompletion(**{**fields, "max_tokens": 4}, messages=messages, tools=tools(), tool_choice="none")
    ).choices
    await ask_again(client, message.model_dump(), plain(message))


@pytest.mark.parametrize("stream", [False, True])
async def test_langchain(url: str, stream: bool) -> None:
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(model="target", base_url=url, api_key="none", max_retries=0, max_tokens=80, temperature=0)
    bound = model.bind_tools([Forecast], tool_choice="required", parallel_tool_calls=False)
    asked: list[Any] = [HumanMessage("Rain?")]
    if stream:
        pieces = [each async for each in bound.astream(asked)]
        message = pieces[0]
        for each in pieces[1:]:
            message += each
    else:
        message = await bound.ainvoke(asked)
    (call,) = message.tool_calls
    assert Forecast(**call["args"]).days > 0
    asked += [message, ToolMessage("rain", tool_call_id=call["id"])]
    assert isinstance((await model.ainvoke(asked)).content, str)
    with pytest.raises(ContextOverflowError):
        await model.ainvoke("the wind " * 3000)


@pytest.mark.parametrize("stream", [False, True])
async def test_pydantic_ai(url: str, stream: bool) -> None:
    """An agent's typed output is a call; the next run continues the conversation with its messages."""
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("target", provider=OpenAIProvider(base_url=url, api_key="none"))
    typed: Any = Agent(model, output_type=ToolOutput(Forecast), model_settings={"max_tokens": 80, "temperature": 0})
    if stream:
        async with typed.run_stream("Rain?") as result:
            output, messages = await result.get_output(), result.all_messages()
    else:
        result = await typed.run("Rain?")
        output, messages = result.output, result.all_messages()
    assert isinstance(output, Forecast)
    again: Any = Agent(model, model_settings={"max_tokens": 6})
    assert isinstance((await again.run("And then?", message_history=messages)).output, str)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
async def test_instructor(url: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructor in its own process, since its folder has to be searched for imports."""
    script = (
        "import sys, instructor, openai, pydantic\n"
        "class Forecast(pydantic.BaseModel):\n"
        "    model_config = pydantic.ConfigDict(extra='forbid')\n"
        "    days: int = pydantic.Field(ge=1, le=9)\n"
        "    rain: bool\n"
        "client = openai.OpenAI(base_url=sys.argv[1], api_key='none', max_retries=0)\n"
        "patched = instructor.from_openai(client, mode=instructor.Mode[sys.argv[2]])\n"
        "asked = dict(model='target', response_model=Forecast, max_tokens=80, temperature=0, max_retries=0)\n"
        "user = {'role': 'user', 'content': 'Rain?'}\n"
        "found, whole = patched.chat.completions.create_with_completion(messages=[user], **asked)\n"
        "print(found.model_dump_json())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(packages.python()))
    printed = await printed_by(sys.executable, "-W", "ignore", "-c", script, url, mode)
    assert Forecast.model_validate(printed)


@pytest.mark.parametrize("name", ["openai", "openai streamed", "vercel", "vercel streamed"])
async def test_javascript(url: str, name: str) -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    folder = packages.javascript()
    printed = await printed_by("node", str(Path(__file__).with_name("clients.mjs")), url, name, str(folder))
    assert 1 <= printed["call"]["days"] <= 9
    assert isinstance(printed["text"], str)


async def printed_by(*words: str) -> Any:
    """Return the JSON that a program prints last, which must succeed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(240):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-2000:]
    return json.loads(output.decode().splitlines()[-1])
