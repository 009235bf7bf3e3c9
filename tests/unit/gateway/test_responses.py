"""OpenAI's Responses API, over scripted answers: items of a request become messages, and an answer becomes items."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from specdec.inference.commit import FinishReason
from specdec.inference.errors import UnavailableError
from specdec.inference.text.chat import Chat, ChatMessage
from specdec.inference.workers.completion import ModelCard
from tests.support.completers import CARD, ScriptedCompleter
from tests.support.tools import PARAMETERS, response_tool
from tests.unit.gateway.test_app import PASSES, TEXT, post
from tests.unit.gateway.test_tools import THINKING, TWO, stopping

TOOL = response_tool(strict=None)


async def ask(completer: ScriptedCompleter, card: ModelCard = CARD, **body: Any) -> httpx.Response:
    return await post(completer, "/v1/responses", {"input": "hi", **body}, card)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, after checking that each has a name, a number counted from 0, and is complete."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    pairs = [block.split("\n") for block in blocks]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {each['type']}" for each in documents]
    assert [each["sequence_number"] for each in documents] == list(range(len(documents)))
    return documents


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


async def test_an_answer_has_openais_shape() -> None:
    answer = await ask(ScriptedCompleter(PASSES), max_output_tokens=6, metadata={"a": "b"})
    response = Response.model_validate(answer.json(), strict=True)
    assert (response.status, response.output_text) == ("incomplete", TEXT)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (3, 6)
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert (response.metadata, answer.json()["store"]) == ({"a": "b"}, False)
    ended = await ask(ScriptedCompleter(PASSES, reason=FinishReason.STOP))
    assert ended.json()["status"] == "completed"


async def test_items_become_the_messages_of_a_chat() -> None:
    completer = ScriptedCompleter(PASSES)
    call = {
        "type": "function_call",
        "call_id": "1",
        "name": "f",
        "arguments": "{}",
        "id": "fc_1",
        "status": "completed",
    }
    text = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
    ]
    answer = await ask(completer, input=items, instructions="Help.", tools=[TOOL])
    assert answer.is_success, answer.text
    prompt = completer.requests[0].prompt
    assert isinstance(prompt, Chat)
    system, developer, user, assistant, first, second = prompt.messages
    assert (system, developer) == (ChatMessage("system", "Help."), ChatMessage("system", "Be short."))
    assert user == ChatMessage("user", "a\nb")
    assert (assistant.content, assistant.reasoning) == ("I look.", "hm")
    assert [each["id"] for each in json.loads(assistant.tool_calls_json)] == ["1", "2"]
    assert first == ChatMessage("tool", "3", tool_call_id="1", name="f")
    assert second == ChatMessage("tool", "4", tool_call_id="2", name="f")
    assert json.loads(prompt.tools_json) == [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]


@pytest.mark.parametrize("thinks", [False, True])
async def test_a_stream_ends_with_the_whole_answer(thinks: bool) -> None:
    """The events of a stream have the same items as the whole answer."""
    texts = ["<think>", "so", " so", "</think>", *TWO] if thinks else TWO
    card = replace(CARD, chat_template=f"{THINKING}<tool_call>") if thinks else CARD
    whole = (await ask(stopping(texts), card, tools=[TOOL])).json()
    streamed = events(await ask(stopping(texts), card, tools=[TOOL], stream=True))
    kinds = [each["type"] for each in streamed]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    output = streamed[-1]["response"]["output"]
    assert without_ids(output) == without_ids(whole["output"])
    expected = [*(["reasoning"] if thinks else []), "message", "function_call", "function_call"]
    assert [item["type"] for item in output] == expected
    assert [each["item"] for each in streamed if each["type"] == "response.output_item.done"] == output
    added = [each["item"]["id"] for each in streamed if each["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in output]
    for number, item in enumerate(output):
        pieces = [each["delta"] for each in streamed if each.get("output_index") == number and "delta" in each]
        assert "".join(pieces) == item.get("arguments", item.get("content", [{}])[0].get("text"))
    usage = streamed[-1]["response"]["usage"]
    assert usage == whole["usage"]
    assert bool(usage["output_tokens_details"]["reasoning_tokens"]) == thinks


async def test_a_choice_of_tools_and_a_format_are_a_chats() -> None:
    completer = ScriptedCompleter(PASSES)
    named = {"type": "function", "name": "f"}
    assert (await ask(completer, tools=[TOOL], tool_choice=named, parallel_tool_calls=False)).is_success
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    assert (await ask(completer, text={"format": schema, "verbosity": "medium"})).is_success
    assert (await ask(completer, text={"format": {"type": "text"}}, seed=7, top_k=3)).is_success
    grammars = [request.grammar for request in completer.requests]
    assert [bool(grammar) for grammar in grammars] == [True, True, False]
    assert (completer.requests[2].seed, completer.requests[2].sampling.top_k) == (7, 3)


async def test_log_probabilities_come_if_they_are_asked_for() -> None:
    answer = await ask(ScriptedCompleter(PASSES), include=["message.output_text.logprobs"], top_logprobs=1)
    (part,) = answer.json()["output"][0]["content"]
    assert len(part["logprobs"]) == 6
    streamed = events(await ask(ScriptedCompleter(PASSES), top_logprobs=1, stream=True))
    deltas = [each for each in streamed if each["type"] == "response.output_text.delta"]
    assert [score for each in deltas for score in each["logprobs"]] == part["logprobs"]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "previous": ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
    "conversation": ({"conversation": "c"}, "conversation", "send the whole conversation as input"),
    "store": ({"store": True}, "store", "answers are not stored here"),
    "background": ({"background": True}, "background", "not supported"),
    "reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "stores nothing"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "reads text alone",
    ),
    "hosted tool": ({"tools": [{"type": "web_search"}]}, "tools", "tools are functions"),
    "custom tool": ({"tools": [{"type": "custom", "name": "x"}]}, "tools", "a text parameter"),
    "allowed": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice",
        "give the tools",
    ),
    "effort": ({"reasoning": {"effort": "high"}}, "reasoning", "effort"),
    "limit": ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    "empty": ({"input": []}, "input", "at least 1"),
    "no text": ({"input": 5}, "input", "list"),
    "part": ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input", "input.0.content.0.text: Field"),
    "choice": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "length": ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_unserved_fields_are_refused_by_name(name: str) -> None:
    body, param, message = REFUSED[name]
    answer = await ask(ScriptedCompleter(PASSES), **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


async def test_a_failure_has_a_status_or_is_the_last_event() -> None:
    refused = await ask(ScriptedCompleter([], error=UnavailableError("gone")))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    failing = ScriptedCompleter(PASSES, error=UnavailableError("gone"))
    streamed = events(await ask(failing, stream=True))
    last = streamed[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "unavailable", "message": "gone"}
    (item,) = last["response"]["output"]
    assert item["status"] == "incomplete", "it was in_progress for ever"
    assert [each["item"] for each in streamed if each["type"] == "response.output_item.done"] == [item]
