"""Messages that clients make of an answer are accepted in the next request; fields that they add change no prompt.

The clients are real ones, over a socket; the model is scripted: it calls a function, or writes JSON, and then ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import pydantic_function_tool
from pydantic import BaseModel

from specdec.inference.commit import FinishReason, TextEvent
from specdec.inference.config import ServerConfig
from specdec.inference.gateway.app import HttpFront
from specdec.inference.gateway.bodies.noops import MAX_SHOWN_CHARACTERS
from specdec.inference.serving.host import opened
from specdec.inference.serving.processes import free_port
from specdec.inference.text import chat
from specdec.inference.text.chat import Chat, ChatMessage
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completion import CompletionRequest
from tests.support.completers import ScriptedCompleter, gateway
from tests.support.models import tiny_tokenizer
from tests.support.tools import tool
from tests.unit.gateway.test_app import PASSES, post

JSON = '{"a": 1}'
CALL = ["I look.\n", "<tool", '_call>\n{"name": "f", "argu', 'ments": {"a": ', "1}}\n</tool_call>"]
USER: Any = {"role": "user", "content": "Will it rain?"}
ASKED: Any = {"model": "tiny", "messages": [USER]}


class Answer(BaseModel):
    """Arguments of the function that the model may call, and the form of the JSON that requests ask for."""

    a: int


class Talker(ScriptedCompleter):
    """Completer that calls function f or writes JSON after a user's message, and says "Done." after any other."""

    def __init__(self) -> None:
        super().__init__([], reason=FinishReason.STOP)

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        assert isinstance(request.prompt, Chat)
        first = CALL if request.prompt.tools_json else [JSON]
        self._passes = [[each] for each in (first if len(request.prompt.messages) == 1 else ["Done."])]
        async for event in super().complete(request):
            yield event


@pytest.fixture
def talker() -> Talker:
    return Talker()


@pytest_asyncio.fixture
async def url(talker: Talker) -> AsyncGenerator[str, None]:
    port = free_port()
    async with opened(HttpFront(gateway(talker, port=port, tool_call_parser="hermes"), ServerConfig(grace_s=1.0))):
        yield f"http://127.0.0.1:{port}/v1"


@pytest_asyncio.fixture
async def client(url: str) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def completions(client: openai.AsyncOpenAI) -> Any:
    return client.chat.completions


async def created(completions: Any, **fields: Any) -> Any:
    return (await completions.create(**fields)).choices[0].message


async def parsed(completions: Any, **fields: Any) -> Any:
    return (await completions.parse(**fields)).choices[0].message


async def streamed(completions: Any, **fields: Any) -> Any:
    async with completions.stream(**fields) as stream:
        return (await stream.get_final_completion()).choices[0].message


async def added_up(completions: Any, **fields: Any) -> Any:
    """Return the message that a user's own code puts together from a stream: texts are joined, other fields kept."""
    whole: dict[str, Any] = {}
    async for chunk in await completions.create(**fields, stream=True):
        add(whole, chunk.choices[0].delta.model_dump(exclude_unset=True))
    return whole


def add(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = whole.setdefault(name, [])
            for call in value:
                calls.extend({} for _ in range(call["index"] + 1 - len(calls)))
                add(calls[call["index"]], call)
        elif isinstance(value, dict):
            add(whole.setdefault(name, {}), value)
        else:
            whole[name] = whole[name] + value if isinstance(value, str) and name in whole else value


WAYS = {"create": created, "parse": parsed, "stream": streamed, "deltas": added_up}
FORMS: dict[str, Callable[[Any], Any]] = {
    "object": lambda message: message,
    "model_dump": lambda message: message if isinstance(message, dict) else message.model_dump(),
    "to_dict": lambda message: message if isinstance(message, dict) else message.to_dict(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
async def test_openais_messages_with_calls(talker: Talker, completions: Any, way: str, form: str) -> None:
    """A message with a tool call may be sent back as openai's client gave it out, in each of the client's ways.

    Regression: `parsed_arguments` of parse, and `index` of streams, were refused with 400.
    """
    fields = {**ASKED, "tools": [pydantic_function_tool(Answer, name="f")]}
    message = FORMS[form](await WAYS[way](completions, **fields))
    (call,) = message["tool_calls"] if isinstance(message, dict) else message.tool_calls
    name = call["id"] if isinstance(call, dict) else call.id
    answer = {"role": "tool", "tool_call_id": name, "content": "rain"}
    last = await completions.create(**{**fields, "messages": [USER, message, answer]})
    assert last.choices[0].message.content == "Done."
    called(talker, name)


def called(talker: Talker, name: str, content: str = "I look.", function: str = "") -> None:
    """Assert that the last prompt has the question, the call in the form for templates, and the tool's answer.

    Args:
        talker: the completer that got the prompt.
        name: id of the call.
        content: of the message with the call.
        function: name of the function in the message with the tool's answer.
    """
    prompt = talker.requests[-1].prompt
    assert isinstance(prompt, Chat)
    user, assistant, answer = prompt.messages
    assert (user, answer) == (
        ChatMessage("user", "Will it rain?"),
        ChatMessage("tool", "rain", "", name, name=function),
    )
    assert (assistant.role, assistant.content, assistant.reasoning) == ("assistant", content, "")
    (call,) = json.loads(assistant.tool_calls_json)
    arguments = call["function"].pop("arguments")
    assert json.loads(arguments) == {"a": 1}
    assert call == {"id": name, "type": "function", "function": {"name": "f"}}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # openai's, of its own object `parsed`
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
async def test_openais_messages_with_json(talker: Talker, completions: Any, way: str, form: str) -> None:
    """A message with JSON may be sent back as openai's client gave it out, in each of the client's ways.

    Regression: `parsed` was refused with 400.
    """
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": Answer.model_json_schema()}}
    shape: Any = Answer if way in ("parse", "stream") else schema
    message = FORMS[form](await WAYS[way](completions, **ASKED, response_format=shape))
    await completions.create(**{**ASKED, "messages": [USER, message, USER]})
    assert talker.requests[-1].prompt == Chat.of(
        ("user", "Will it rain?"), ("assistant", JSON), ("user", "Will it rain?")
    )


@pytest.mark.long
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("stream", [False, True])
async def test_litellm(talker: Talker, url: str, client: Any, provider: str, stream: bool) -> None:
    """A program that uses litellm may send litellm's messages back as they are.

    Regression: `provider_specific_fields`, which litellm makes of our `refusal: null`, was refused with status 400.
    """
    litellm = pytest.importorskip("litellm")
    cleanup = pytest.importorskip("litellm.llms.custom_httpx.async_client_cleanup")
    fields: Any = {"model": f"{provider}/tiny", "api_base": url, "api_key": "none", "tools": [tool()]}
    fields |= {"client": client} if provider == "openai" else {}
    first = await litellm.acompletion(messages=[USER], stream=stream, **fields)
    if stream:
        first = litellm.stream_chunk_builder([chunk async for chunk in first])
    message = first.choices[0].message
    (call,) = message.tool_calls
    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    last = await litellm.acompletion(messages=[USER, message, answer], **fields)
    await cleanup.close_litellm_async_clients()
    assert last.choices[0].message.content == "Done."
    called(talker, call.id)


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_langchain(talker: Talker, url: str, stream: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(model="tiny", base_url=url, api_key="none", max_retries=0).bind_tools([tool()])
    history: list[Any] = [HumanMessage("Will it rain?")]
    if stream:
        pieces = [piece async for piece in model.astream(history)]
        message = sum(pieces[1:], pieces[0])
    else:
        message = await model.ainvoke(history)
    (call,) = message.tool_calls
    last = await model.ainvoke([*history, message, ToolMessage("rain", tool_call_id=call["id"])])
    assert last.content == "Done."
    called(talker, call["id"])


@pytest.mark.long
async def test_pydantic_ai(talker: Talker, client: Any) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    model = models.OpenAIChatModel("tiny", provider=providers.OpenAIProvider(openai_client=client))
    agent = pydantic_ai.Agent(model)

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def f(a: int) -> str:
        return "rain" if a == 1 else "sun"

    result = await asyncio.wait_for(agent.run("Will it rain?"), 60)
    assert result.output == "Done."
    prompt = talker.requests[-1].prompt
    assert isinstance(prompt, Chat)
    called(talker, prompt.messages[-1].tool_call_id)


async def prompt_of(*messages: Any, **fields: Any) -> Chat:
    completer = ScriptedCompleter(PASSES)
    answer = await post(completer, "/v1/chat/completions", {"messages": list(messages), **fields})
    assert answer.is_success, answer.text
    prompt = completer.requests[0].prompt
    assert isinstance(prompt, Chat)
    return prompt


OTHERS: dict[str, Any] = {
    "id": "msg_1",
    "timestamp": 5,
    "annotations": [{"type": "url_citation"}],
    "audio": {"id": "audio_1"},
    "parsed": {"n": [1]},
    "reasoning_details": [{"text": "hm"}],
    "cache_control": {"type": "ephemeral"},
    "provider_specific_fields": {"refusal": None},
    "copilot_mcp_server_name": "x",
    "index": 0,
    "x" * 5000: 1,
}
"""Fields that other clients and servers add to messages."""


async def test_other_fields_of_a_conversation_change_nothing() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    others = {**call, **OTHERS, "id": "1", "function": {**call["function"], **OTHERS}}  # type: ignore[dict-item]
    parts = [{"type": "text", "text": "Will it rain?", **OTHERS}]
    offered = {**tool(), **OTHERS, "function": {**tool()["function"], **OTHERS}}
    plain = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    asked = [{**USER, **OTHERS, "content": parts}, {**plain[1], **OTHERS, "tool_calls": [others]}]
    assert await prompt_of(*asked, tools=[offered]) == await prompt_of(*plain, tools=[tool()])


READ: dict[str, tuple[dict[str, Any], ChatMessage]] = {
    "vLLM's reasoning": ({"content": "x", "reasoning": "hm"}, ChatMessage("assistant", "x", reasoning="hm")),
    "both": (
        {"content": "x", "reasoning": "no", "reasoning_content": "hm"},
        ChatMessage("assistant", "x", reasoning="hm"),
    ),
    "one is null": (
        {"content": "x", "reasoning": "hm", "reasoning_content": None},
        ChatMessage("assistant", "x", reasoning="hm"),
    ),
    "refusal": ({"content": None, "refusal": "I cannot."}, ChatMessage("assistant", "I cannot.")),
    "refusal beside text": ({"content": "x", "refusal": "I cannot."}, ChatMessage("assistant", "x")),
    "refusal part": (
        {"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
        ChatMessage("assistant", "a\nb"),
    ),
    "reasoning alone": ({"content": None, "reasoning_content": "hm"}, ChatMessage("assistant", reasoning="hm")),
    "nothing": ({"content": None}, ChatMessage("assistant")),
}


@pytest.mark.parametrize("name", READ)
async def test_answers_of_other_servers_are_read(name: str) -> None:
    fields, expected = READ[name]
    message = {"role": "assistant", **fields}
    assert (await prompt_of(USER, message)).messages[1] == expected
    assert Chat.read([USER, message]).messages[1] == expected, "the library reads the same"


async def test_parts_are_lines() -> None:
    """Parts of a text are joined by a line break, as in vLLM.

    Regression: they were joined without a break, as "Hithere".
    """
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    assert await prompt_of({"role": "user", "content": parts}) == Chat.of(("user", "Hi\nthere"))


async def test_parts_and_items_of_the_responses_api() -> None:
    part: dict[str, Any] = {
        "type": "output_text",
        "text": "a",
        "annotations": [{}],
        "parsed": {"n": 1},
        "logprobs": None,
    }
    items = [
        {"type": "message", "role": "user", "content": "Will it rain?", "timestamp": 5},
        {
            "type": "message",
            "role": "assistant",
            "phase": "final",
            "content": [part, {"type": "refusal", "refusal": "b"}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "parsed_arguments": {}},
        {"type": "function_call_output", "call_id": "1", "output": "rain", "created_by": "me"},
    ]
    tools = [{**tool()["function"], "type": "function", "cache_control": {"type": "ephemeral"}}]
    completer = ScriptedCompleter(PASSES)
    answer = await post(completer, "/v1/responses", {"input": items, "tools": tools})
    assert answer.is_success, answer.text
    prompt = completer.requests[0].prompt
    assert isinstance(prompt, Chat)
    user, assistant, last = prompt.messages
    assert (user, last) == (ChatMessage("user", "Will it rain?"), ChatMessage("tool", "rain", "", "1", "f"))
    assert assistant.content == "a\nb"
    assert json.loads(assistant.tool_calls_json)[0]["function"] == {"name": "f", "arguments": "{}"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "top level": ({"messages": [USER], "whatever": 1}, "whatever is not supported here"),
    "kind of part": ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "a part of type audio"),
    "no text": ({"messages": [{"role": "user", "content": [{"type": "text", "texts": "x"}]}]}, "text: Field required"),
    "no content": ({"messages": [{"role": "user", "contents": "x"}]}, "messages.0: content is needed"),
    "no function": ({"messages": [USER], "tools": [{"type": "function", "name": "f"}]}, "tools.0.function: Field"),
    "strict beside it": ({"messages": [USER], "tools": [{**tool(), "strict": True}]}, "a field of the function"),
    "half a character in a type": ({"messages": [{"role": "user", "content": [{"type": "\ud83d"}]}]}, r"type \ud83d"),
    "choice": (
        {"messages": [USER], "tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
        "not supported here",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_would_change_an_answer_is_refused(name: str) -> None:
    body, message = REFUSED[name]
    answer = await post(ScriptedCompleter(PASSES), "/v1/chat/completions", body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_a_misspelled_field_is_named_in_the_log_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_NOTED", set())
    caplog.set_level(logging.WARNING)
    misspelt = {**USER, "toolcalls": [], "reasoning_details": [], "cache_control": {}, "y" * 5000: 1}
    for _ in range(2):
        await prompt_of({**misspelt, "content": [{"type": "text", "text": "a", "txt": 1}]})
    said = "the field {!r} of a {} is ignored; did you mean {}?".format
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [said("toolcalls", "Message", "tool_calls"), said("txt", "TextPart", "text")]
    assert all(len(line) < 100 + MAX_SHOWN_CHARACTERS for line in lines)
    monkeypatch.setattr(chat, "MAX_NOTED", len(chat._NOTED))
    await prompt_of({**USER, "contnt": "x"})
    assert len(caplog.records) == 2, "a hostile client cannot fill the log"


TEMPLATES = {
    "description": "{% for tool in tools %}{{ tool.function.description | trim }}{% endfor %}",
    "properties": "{% for t in tools %}{% for k in t.function.parameters.properties.items() %}{{ k }}{% endfor %}"
    "{% endfor %}",
    "as JSON": "{{ tools[0].function.parameters | tojson }}{{ tools[0].function.description + '.' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "fields",
    [{}, {"parameters": None, "description": None}, {"parameters": {}}, {"parameters": {"type": "object"}}],
    ids=["bare", "null", "empty", "without properties"],
)
def test_functions_without_a_description_or_parameters_work_in_templates(name: str, fields: dict[str, Any]) -> None:
    """A function without a description or parameters gets empty ones, since templates print both without a check.

    Regression: 12 of 70 public templates failed with "no attribute 'parameters'".
    """
    tokenizer = Tokenizer(tiny_tokenizer(chat_template=TEMPLATES[name]), frozenset())
    tools = [{"type": "function", "function": {"name": "f", **fields}}]
    bare = tokenizer.encode_chat(Chat((ChatMessage("user", "x"),), json.dumps(tools)))
    whole = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": whole}]
    assert bare == tokenizer.encode_chat(Chat((ChatMessage("user", "x"),), json.dumps(tools)))


def test_complete_functions_keep_their_order() -> None:
    """A complete function reaches the template in the client's order of fields, on which the prompt's text depends."""
    given = {"parameters": {"properties": {"a": {}}, "type": "object"}, "name": "f", "description": "d"}
    (spoken,) = Chat((), json.dumps([{"type": "function", "function": given}])).tools() or []
    assert json.dumps(spoken["function"]) == json.dumps(given)
