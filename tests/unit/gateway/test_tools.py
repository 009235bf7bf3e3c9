"""Tools and reasoning over HTTP, with scripted text: what the completer is asked, and answers made from its text."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.inference.cli.roles.registry import parser_of
from specdec.inference.commit import FinishReason
from specdec.inference.config import ROOT
from specdec.inference.errors import InvalidRequestError
from specdec.inference.gateway import requests
from specdec.inference.request import Grammar, GrammarKind, Preamble
from specdec.inference.text.chat import Chat, ChatMessage
from specdec.inference.workers.completion import ModelCard
from tests.support import llmperf
from tests.support.completers import CARD, ScriptedCompleter
from tests.support.tools import tool
from tests.unit.gateway.test_app import HELLO, PASSES, events, post

TEXTS = ["I look.\n", "<tool", '_call>\n{"name": "f", "argu', 'ments": {"a": ', "1}}\n</tool_call>"]
TWO = [*TEXTS, "\n", *TEXTS[1:]]
THINKING = "{% if add_generation_prompt %}<think>{% endif %}"


async def ask(
    completer: ScriptedCompleter, body: dict[str, Any], card: ModelCard = CARD, **settings: Any
) -> httpx.Response:
    return await post(completer, "/v1/chat/completions", {"messages": [HELLO], **body}, card, **settings)


async def grammar_of(body: dict[str, Any], card: ModelCard = CARD, **settings: Any) -> Grammar | None:
    completer = ScriptedCompleter(PASSES)
    response = await ask(completer, body, card, **settings)
    assert response.is_success, response.text
    return completer.requests[0].grammar


def stopping(texts: list[str]) -> ScriptedCompleter:
    return ScriptedCompleter([[text] for text in texts], reason=FinishReason.STOP)


@pytest.mark.parametrize("parallel", [True, False])
async def test_streamed_and_whole_answers_have_equal_calls(parallel: bool) -> None:
    body = {"tools": [tool()], "parallel_tool_calls": parallel}
    (choice,) = (await ask(stopping(TWO), body)).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
    calls = [each["function"] for each in choice["message"]["tool_calls"]]
    assert calls == [{"name": "f", "arguments": '{"a": 1}'}] * (1 + parallel)
    chunks = [each["choices"][0] for each in events(await ask(stopping(TWO), {**body, "stream": True}))]
    assert len(chunks) == len(TWO), "an event is a token"
    assert (chunks[0]["delta"]["role"], chunks[-1]["finish_reason"]) == ("assistant", "tool_calls")
    assert "".join(each["delta"].get("content", "") for each in chunks) == "I look."
    pieces = [piece for each in chunks for piece in each["delta"].get("tool_calls", ())]
    heads = [piece for piece in pieces if "id" in piece]
    assert [(head["index"], head["type"], head["function"]["name"]) for head in heads] == [
        (i, "function", "f") for i in range(1 + parallel)
    ]
    for head in heads:
        fragments = [each["function"]["arguments"] for each in pieces if each["index"] == head["index"]]
        assert len(fragments) > 1
        assert "".join(fragments) == '{"a": 1}'


async def test_without_a_call_the_text_is_the_content() -> None:
    for body in (
        {"tools": [tool()]},
        {"tools": [tool("g")], "tool_choice": "auto"},
        {"tools": [tool()], "tool_choice": "none"},
    ):
        texts = TEXTS[:2] if body["tools"] == [tool()] else TEXTS
        (choice,) = (await ask(stopping(texts), body)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("".join(texts), "stop")
        assert "tool_calls" not in choice["message"]


async def test_a_cut_call_ends_for_its_length() -> None:
    (choice,) = (await ask(ScriptedCompleter([[text] for text in TEXTS[:4]]), {"tools": [tool()]})).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": '}


async def test_conversation_fields_reach_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "3", "name": "f"},
    ]
    completer = ScriptedCompleter(PASSES)
    fields = {"tools": [tool(strict=True)], "enable_thinking": False, "chat_template_kwargs": {"now": 1}}
    assert (await ask(completer, {"messages": messages, **fields})).is_success
    prompt = completer.requests[0].prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages == (
        ChatMessage("user", "x"),
        ChatMessage("assistant", "", json.dumps([call]), reasoning="hm"),
        ChatMessage("tool", "3", tool_call_id="1", name="f"),
    )
    assert json.loads(prompt.tools_json) == [tool()], "strict is not the template's affair"
    assert prompt.template_kwargs() == {"now": 1, "enable_thinking": False}
    await ask(completer, {"tools": [tool()], "tool_choice": "none"})
    assert completer.requests[1].prompt == Chat.of(("user", "x")), "what must not be called is not spoken of"


async def test_tool_choices_that_make_a_grammar() -> None:
    tools = [tool(), tool("g", None)]
    assert await grammar_of({"tools": tools}) is None
    assert await grammar_of({"tools": tools, "tool_choice": "none"}) is None
    required = await grammar_of({"tools": tools, "tool_choice": "required"})
    named = await grammar_of({"tools": tools, "tool_choice": {"type": "function", "function": {"name": "g"}}})
    strict = await grammar_of({"tools": [*tools, tool("h", strict=True)]})
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    either = await grammar_of({"tools": tools, "response_format": schema})
    assert required is not None
    assert named is not None
    assert strict is not None
    assert either is not None
    assert ("f\\" in required.text, "g\\" in required.text, "{0,15}" in required.text) == (True, True, True)
    assert ("f\\" in named.text, "g\\" in named.text, "{0,15}" in named.text) == (False, True, False)
    assert "TEXT" in strict.text
    assert "@output" in either.text
    one = await grammar_of({"tools": tools, "tool_choice": "required", "parallel_tool_calls": False})
    llama = await grammar_of({"tools": tools, "tool_choice": "required"}, tool_call_parser="llama3_json")
    assert one is not None
    assert llama is not None
    assert ("{0,15}" in one.text, "{0,15}" in llama.text, "tool_call" in llama.text) == (False, False, False)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"tools": [{**tool(), "type": "web_search"}]}, "tools.0: a tool of type web_search is not supported"),
    "custom tool": ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "give this one as a function"),
    "custom choice": (
        {"tools": [tool()], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        "tool_choice: tool_choice of type custom is not supported here: give the tools that may be called as tools",
    ),
    "allowed tools": (
        {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice of type allowed_tools is not supported here",
    ),
    "half a choice": ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
    "name": ({"tools": [tool("a b")]}, "tools.0.function.name"),
    "twice": ({"tools": [tool(), tool()]}, "tools name f twice"),
    "array": ({"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters"),
    "many": ({"tools": [tool(f"f{i}") for i in range(129)]}, "128"),
    "long": ({"tools": [tool(description="x" * 140_000)]}, "131072"),
    "long grammar": (
        {"tools": [tool(parameters={"title": "x" * 99_000})], "guided_json": {"title": "x" * 250_000}},
        "262144",
    ),
    "surrogate": ({"tools": [tool(parameters={"title": "\ud800"})]}, "UTF-8"),
    "nothing to choose from": ({"tool_choice": "required"}, "tool_choice required needs tools"),
    "no such tool": (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice names g, which is none of the tools",
    ),
    "a regex beside": ({"tools": [tool()], "guided_regex": "a"}, "only JSON"),
    "template": ({"chat_template_kwargs": {"x": "y" * 5000}}, "4096"),
}


@pytest.mark.parametrize(("body", "part"), REFUSED.values(), ids=REFUSED)
async def test_faults_are_named(body: dict[str, Any], part: str) -> None:
    completer = ScriptedCompleter(PASSES)
    response = await asyncio.wait_for(ask(completer, body), 60)
    error = response.json()["error"]
    assert (response.status_code, part in error["message"]) == (400, True), error
    assert error["param"] in [*body, "guided_regex"]
    assert not completer.requests


FAULT = InvalidRequestError("json_schema: Invalid type: nonsense", field="grammar")
NONSENSE = {"type": "object", "properties": {"b": {"type": "nonsense"}}}
FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools": (
        {"tools": [tool(), tool("g", NONSENSE)], "tool_choice": "required"},
        "tools",
        "tools[1].function.parameters.properties.b: ",
    ),
    "all tools": ({"tools": [tool()], "tool_choice": "required"}, "tools", "nonsense"),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format", "nonsense"),
    "guided_json": ({"guided_json": NONSENSE}, "guided_json", "nonsense"),
    "structured_outputs": ({"structured_outputs": {"regex": "("}}, "structured_outputs", "nonsense"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param", "part"), FIELDS.values(), ids=FIELDS)
async def test_an_upstream_fault_names_the_clients_field(
    body: dict[str, Any], param: str, part: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server behind a gateway finds an error in a grammar, the answer names the field that the client has sent.

    The error about `body` names the field `param`, and has `part` in its message.

    Regression: a fault of guided_regex was reported as one of response_format, which the client had not
    sent.
    """
    monkeypatch.setattr(requests, "SEARCH_S", 60.0)  # a loaded machine takes more than half a second for two tools
    response = await ask(ScriptedCompleter([], error=FAULT), {**body, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["param"], part in error["message"]) == (400, param, True), error


async def test_a_template_that_knows_no_calls() -> None:
    card = replace(CARD, chat_template="{{ messages[0].content }}", call_format="")
    refused = await ask(ScriptedCompleter(PASSES), {"tools": [tool()]}, card)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert "--tool_call_parser hermes or llama3_json" in refused.json()["error"]["message"]
    (choice,) = (await ask(stopping(TEXTS), {"tools": [tool()]}, card, tool_call_parser="hermes")).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert (await ask(stopping(TEXTS), {"tools": [tool()]}, tool_call_parser="none")).status_code == 400


@pytest.mark.parametrize("effort", ["low", "medium"])
async def test_an_effort_goes_to_templates_that_know_it(effort: str) -> None:
    """A `reasoning_effort` is passed on to a chat template that uses that field.

    Regression: every effort but medium was refused, even if the template uses the field.
    """
    completer, body = ScriptedCompleter(PASSES), {"reasoning_effort": effort}
    knows = replace(CARD, chat_template="{{ reasoning_effort }}{{ messages[0].content }}")
    assert (await ask(completer, body, knows)).is_success
    prompt = completer.requests[0].prompt
    assert isinstance(prompt, Chat)
    assert prompt.template_kwargs() == body
    refused = await ask(completer, body)
    assert (refused.status_code, refused.is_success) == ((400, False) if effort == "low" else (200, True))


@pytest.mark.parametrize("begun", [True, False])
async def test_reasoning_stands_apart(begun: bool) -> None:
    """A model's reasoning is in the field `reasoning_content`, and not in the content.

    The end of the prompt shows whether the template has begun the reasoning, so the gateway has the prompt echoed.
    """
    card = replace(CARD, chat_template=THINKING)
    texts = ["<think>"] * (not begun) + ["\nI ", "think", "\n</think", ">\n\n", "So", "!"]
    for stream in (False, True):
        completer = ScriptedCompleter([[text] for text in texts], prompt="x<think>\n" if begun else "x")
        response = await ask(completer, {"stream": stream}, card)
        assert completer.requests[0].echo
        fields = [each["choices"][0] for each in events(response)] if stream else response.json()["choices"]
        parts = [each["delta" if stream else "message"] for each in fields]
        assert "".join(each.get("reasoning_content", "") for each in parts) == "I think"
        assert "".join(each.get("content", "") for each in parts) == "So!"


QWEN3 = sorted((ROOT / "configs").glob("qwen3-*.toml"))


@pytest.mark.parametrize("role", ["target", "fused_target"])
@pytest.mark.parametrize("file", QWEN3, ids=lambda file: str(file.stem))
async def test_llmperf_reads_the_thoughts_of_a_model(file: Path, role: str) -> None:
    """Servers as in the tutorials send a model's reasoning as content, since LLMPerf reads nothing else.

    Regression: LLMPerf does not read `reasoning_content`, so TTFT was the time until Qwen3's thoughts ended.
    """
    http = vars(parser_of(role).parse_args(["--config", str(file)]))
    card = replace(CARD, chat_template=THINKING)
    for begun in (True, False):
        texts = ["<think>"] * (not begun) + ["I ", "think", "</think>", "So", "!"]
        completer = ScriptedCompleter([[text] for text in texts], prompt="x<think>\n" if begun else "x")
        body = llmperf.body("x", len(texts), model="tiny")
        response = await ask(completer, body, card, reasoning_parser=http["reasoning_parser"])
        assert llmperf.reads(response.content) == (len(texts), len(texts), "".join(texts))


async def test_a_grammar_begins_after_the_reasoning() -> None:
    card, body = replace(CARD, chat_template=THINKING), {"response_format": {"type": "json_object"}}
    after, without = await grammar_of(body, card), await grammar_of(body, card, reasoning_parser="none")
    assert after == Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', Preamble.REASONING)
    assert without == await grammar_of(body) == replace(after, preamble=Preamble.NONE)


async def test_a_search_for_tool_faults_has_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the tool whose schema is invalid has one time limit for all tools.

    Regression: if no tool was at fault, each schema was compiled, which occupied a thread for minutes.
    """
    looked: list[Any] = []

    def fault_of_schema(schema: Any) -> tuple[str, str]:
        looked.append(schema)
        return "", ""

    monkeypatch.setattr(requests, "fault_of_schema", fault_of_schema)
    monkeypatch.setattr(requests, "SEARCH_S", -1.0)
    fault = InvalidRequestError("regex: no end", field="grammar")
    answer = await ask(ScriptedCompleter([], error=fault), {"tools": [tool(f"f{i}") for i in range(9)]}, CARD)
    assert answer.status_code == 400
    assert looked == []
