"""Anthropic's Messages API, over scripted answers: blocks of a request become messages, and answers become blocks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.inference.commit import Delta, FinishReason, TextEvent
from specdec.inference.errors import CapacityError, ContextLengthError, DeadlineError, SpecDecError, UnavailableError
from specdec.inference.gateway.app import create_app
from specdec.inference.text.chat import Chat, ChatMessage
from specdec.inference.workers.calls.access import Access
from specdec.inference.workers.completion import CompletionRequest, ModelCard
from tests.support.completers import CARD, ScriptedCompleter, gateway
from tests.support.ports import entry, token_of
from tests.support.tools import PARAMETERS
from tests.unit.gateway.test_app import HELLO, PASSES, TEXT, client_of, post
from tests.unit.gateway.test_tools import THINKING, TWO, stopping

TOOL = {"name": "f", "input_schema": PARAMETERS}
THINKER = replace(CARD, chat_template=f"{THINKING}<tool_call>")
CALL = {"type": "tool_use", "name": "f", "input": {"a": 1}}


async def ask(completer: ScriptedCompleter, card: ModelCard = CARD, **body: Any) -> httpx.Response:
    return await post(completer, "/v1/messages?beta=true", {"messages": [HELLO], "max_tokens": 6, **body}, card)


async def asked(card: ModelCard = CARD, **body: Any) -> CompletionRequest:
    """Send a body to the Messages API; return the request that the completer then gets."""
    completer = ScriptedCompleter(PASSES)
    answer = await ask(completer, card, **body)
    assert answer.is_success, answer.text
    return completer.requests[0]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, after checking that each has a name and is complete."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    pairs = [block.split("\n") for block in blocks]
    documents: list[dict[str, Any]] = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {each['type']}" for each in documents]
    return documents


def added_up(streamed: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client puts together from a stream's events."""
    message: dict[str, Any] = {**streamed[0]["message"], "content": []}
    texts: list[str] = []
    for event in streamed[1:]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append(block)
                texts.clear()
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(message["content"]) - 1
                (piece,) = delta.keys() - {"type"}
                texts.append(delta[piece])
            case {"type": "content_block_stop"}:
                block, text = message["content"][-1], "".join(texts)
                block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {block["type"]: text}
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": message["usage"] | usage}
    assert streamed[-1] == {"type": "message_stop"}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {key: value for key, value in {**message, "content": content}.items() if key not in ("id", "metrics")}


async def test_an_answer_has_anthropics_shape() -> None:
    answer = (await ask(ScriptedCompleter(PASSES))).json()
    assert answer.pop("id").startswith("msg_")
    assert answer.pop("metrics")["speculative_decoding"]["num_spec_steps"] == 3
    usage = {"input_tokens": 1, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0, "output_tokens": 6}
    content = [{"type": "text", "text": TEXT}]
    head = {"type": "message", "role": "assistant", "model": "tiny", "content": content}
    assert answer == {**head, "stop_reason": "max_tokens", "stop_sequence": None, "usage": usage}
    ended = await ask(ScriptedCompleter(PASSES, reason=FinishReason.STOP))
    assert ended.json()["stop_reason"] == "end_turn"


async def test_blocks_become_the_messages_of_a_chat() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look.", "citations": None},
                {**CALL, "id": "1", "caller": {"type": "direct"}},
                {**CALL, "id": "2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "3", "is_error": False},
                {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "4", **cached}]},
                {"type": "tool_result", "tool_use_id": "other"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Help.", **cached}, {"type": "text", "text": "Be short."}]
    tools = [{**TOOL, "type": "custom", "description": "d", **cached}]
    prompt = (await asked(messages=turns, system=system, tools=tools)).prompt
    assert isinstance(prompt, Chat)
    first, user, assistant, *results, last = prompt.messages
    assert (first, user) == (ChatMessage("system", "Help.\nBe short."), ChatMessage("user", "a\nb"))
    assert (assistant.role, assistant.content, assistant.reasoning) == ("assistant", "I look.", "hm")
    calls = json.loads(assistant.tool_calls_json)
    assert [(each["id"], each["function"]) for each in calls] == [
        (name, {"name": "f", "arguments": '{"a": 1}'}) for name in "12"
    ]
    assert results == [
        ChatMessage("tool", "3", tool_call_id="1", name="f"),
        ChatMessage("tool", "4", tool_call_id="2", name="f"),
        ChatMessage("tool", "", tool_call_id="other"),
    ]
    assert last == ChatMessage("user", "And?")
    function = {"name": "f", "description": "d", "parameters": PARAMETERS}
    assert json.loads(prompt.tools_json) == [{"type": "function", "function": function}]


@pytest.mark.parametrize("thinks", [False, True])
async def test_a_stream_adds_up_to_the_whole_answer(thinks: bool) -> None:
    texts = ["<think>", "so", " so", "</think>", *TWO] if thinks else TWO
    card = THINKER if thinks else CARD
    whole = (await ask(stopping(texts), card, tools=[TOOL])).json()
    streamed = events(await ask(stopping(texts), card, tools=[TOOL], stream=True))
    assert without_ids(added_up(streamed)) == without_ids(whole)
    thought = [{"type": "thinking", "thinking": "so so", "signature": ""}] if thinks else []
    assert without_ids(whole)["content"] == [*thought, {"type": "text", "text": "I look."}, CALL, CALL]
    assert len({block["id"] for block in whole["content"] if "id" in block}) == 2
    assert whole["stop_reason"] == "tool_use"
    assert streamed[0]["message"]["content"] == []
    assert streamed[0]["message"]["usage"] == {**whole["usage"], "output_tokens": 1}


async def test_a_call_that_the_limit_cuts_has_the_arguments_so_far() -> None:
    texts = [["<tool_call>"], ['{"name": "f", "arguments": {"a": 1, "b": [2, "x']]
    (call,) = (await ask(ScriptedCompleter(texts), tools=[TOOL])).json()["content"]
    assert call["input"] == {"a": 1, "b": [2]}
    texts[1] = ['{"name": "f", "arguments": {a: NaN}}</tool_call>']
    (call,) = (await ask(ScriptedCompleter(texts), tools=[TOOL])).json()["content"]
    assert call["input"] == {}


async def test_parameters_are_a_chats() -> None:
    plain = await asked(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"], metadata={"user_id": "u"})
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.sampling.top_k) == (0.5, 0.9, 7)
    assert (plain.max_new_tokens, plain.stop, plain.grammar) == (6, ("x",), None)
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    formed = await asked(output_config={"format": schema, "effort": "high"}, context_management={"edits": []})
    assert formed.grammar is not None
    for thinking, enabled in (("disabled", False), ("adaptive", True), ("enabled", True)):
        prompt = (await asked(thinking={"type": thinking, "budget_tokens": 1024})).prompt
        assert isinstance(prompt, Chat)
        assert prompt.template_kwargs() == {"enable_thinking": enabled}


async def test_choices_of_tools_are_a_chats() -> None:
    async def grammar(**choice: Any) -> str:
        request = await asked(tools=[TOOL], tool_choice=choice)
        assert isinstance(request.prompt, Chat)
        assert bool(request.prompt.tools_json) is (choice["type"] != "none")
        return request.grammar.text if request.grammar else ""

    assert await grammar(type="any") != await grammar(type="any", disable_parallel_tool_use=True)
    assert await grammar(type="tool", name="f") == await grammar(type="any", disable_parallel_tool_use=True)
    assert [await grammar(type=each) for each in ("auto", "none")] == ["", ""]


async def test_an_answer_goes_on_with_what_the_client_has_begun() -> None:
    begun = {"role": "assistant", "content": "It is "}
    prompt = (await asked(messages=[HELLO, begun])).prompt
    assert isinstance(prompt, Chat)
    assert prompt.template_kwargs() == {"add_generation_prompt": False, "continue_final_message": True}
    prompt = (await asked(messages=[HELLO, {"role": "assistant", "content": [{**CALL, "id": "1"}]}])).prompt
    assert isinstance(prompt, Chat)
    assert not prompt.template_kwargs()


class Spelled(ScriptedCompleter):
    """Completer that ends with words of 7, 3 and 2 letters (see `WordCodec`); a stop string hides the last two."""

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        async for event in super().complete(request):
            yield replace(event, token_ids=(7, 3, 2)) if isinstance(event, Delta) and event.finish_reason else event


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_is_named_that_ended_the_text(stream: bool) -> None:
    for stops, found in ((["y", " xxx xx"], " xxx xx"), (["y"], None)):
        answer = await ask(Spelled(PASSES, reason=FinishReason.STOP), stop_sequences=stops, stream=stream)
        message = added_up(events(answer)) if stream else answer.json()
        assert (message["stop_sequence"], message["stop_reason"]) == (found, "stop_sequence" if found else "end_turn")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages.0.content.0: a block of type image is not supported here: this model reads text alone",
    ),
    "image in a result": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}],
                }
            ]
        },
        "a part of type image is not supported here: this model reads text alone",
    ),
    "half a call": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]},
        "messages.0.content.0: a block of type tool_use needs name and input",
    ),
    "server's tool": (
        {"tools": [{"type": "web_search_20260318", "name": "web_search"}]},
        "tools.0: a tool of type web_search_20260318 is not supported here: tools are functions",
    ),
    "servers": ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    "unknown tool": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names g"),
    "no name": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: Field required"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: Input should be"),
    "nothing": ({"messages": []}, "messages: List should have at least 1 item"),
    "limit": ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    "temperature": ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_faults_are_named_in_anthropics_form(name: str) -> None:
    body, message = REFUSED[name]
    answer = await ask(ScriptedCompleter(PASSES), **body)
    error = answer.json()["error"]
    assert (answer.status_code, answer.json()["type"], error["type"]) == (400, "error", "invalid_request_error")
    assert message in error["message"]


async def test_a_stored_conversation_is_refused_as_the_client_expects() -> None:
    """A request for a stored conversation gets the error at which Anthropic's client sends the whole conversation."""
    answer = await ask(ScriptedCompleter(PASSES), thread={"type": "create"})
    assert answer.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert "send the whole one as messages" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (CapacityError("full", retry_after_s=2.0), 429, "rate_limit_error"),
        (ContextLengthError("too long", field="prompt"), 400, "invalid_request_error"),
        (DeadlineError("late"), 504, "timeout_error"),
        (UnavailableError("gone"), 503, "overloaded_error"),
    ],
)
async def test_failures_have_anthropics_types(error: SpecDecError, status: int, kind: str) -> None:
    """A failure has Anthropic's type and a status; after the first token it is the last event of the stream."""
    refused = await ask(ScriptedCompleter([], error=error))
    assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)
    *others, last = events(await ask(ScriptedCompleter(PASSES, error=error), stream=True))
    assert (last["type"], last["error"]["type"]) == ("error", kind)
    assert others[0]["type"] == "message_start"


async def test_an_unknown_model_is_not_found() -> None:
    answer = await ask(ScriptedCompleter(PASSES), model="claude-haiku-4-5")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


async def test_silence_is_filled_with_pings() -> None:
    body = {"messages": [HELLO], "stream": True}
    answer = await post(ScriptedCompleter(PASSES, gap_s=0.2), "/v1/messages", body, sse_ping_s=0.02)
    streamed = events(answer)
    assert {"type": "ping"} in streamed
    assert added_up(streamed)["content"] == [{"type": "text", "text": TEXT}]


async def test_tokens_are_counted_without_a_limit_or_an_answer() -> None:
    async with client_of(completer := ScriptedCompleter(PASSES)) as client:
        body = {"messages": [HELLO], "system": "Be short.", "tools": [TOOL]}
        answer = await client.post("/v1/messages/count_tokens?beta=true", json=body)
        assert answer.json() == {"input_tokens": 1 + len(f"Be short. {HELLO['content']}".split())}
        wrong = await client.post("/v1/messages/count_tokens", json={**body, "model": "other"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")
    assert not completer.requests


async def test_a_token_may_come_in_anthropics_header(tmp_path: Path) -> None:
    (auth_file := tmp_path / "auth.toml").write_text(entry("client", "client"))
    app = create_app(gateway(ScriptedCompleter(PASSES)), Access(auth_file))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        body = {"messages": [HELLO]}
        for headers, status in (
            ({"x-api-key": token_of("client")}, 200),
            ({"Authorization": f"Bearer {token_of('client')}", "x-api-key": "other"}, 200),
            ({"x-api-key": "other"}, 401),
            ({"Authorization": "Bearer other", "x-api-key": token_of("client")}, 401),
            ({}, 401),
        ):
            answer = await client.post("/v1/messages", json=body, headers=headers)
            assert answer.status_code == status, (headers, answer.text)
            assert status == 200 or answer.json()["error"]["type"] == "authentication_error"
