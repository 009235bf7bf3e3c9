"""Streams that go on at another gateway: what came before the cut and behind it is the undisturbed answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from inference import errors
from inference.commit import FinishReason
from inference.config import HttpConfig, ModelConfig
from inference.gateway import resumable
from inference.gateway.app import Gateway, create_app
from inference.gateway.event_id import MAX_ID_CHARACTERS
from inference.observe.metrics import Metrics
from inference.request import Provenance
from inference.workers.completion import Completer, ModelCard
from inference.workers.local import LocalCompleter
from tests.conftest import ModelDirectories
from tests.support.completers import CARD, ScriptedCompleter, healthy
from tests.unit.gateway.test_tools import THINKING, TWO, tool
from tests.unit.workers.test_resume import server

pytestmark = pytest.mark.asyncio(loop_scope="module")

ORIGIN = Provenance("m", "", "d")
PASSES = [["Once", " upon"], [" a", " time", ""], ["!"]]
HELLO = {"role": "user", "content": "hello"}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def scripted(passes: list[list[str]] = PASSES, *, origin: Provenance = ORIGIN, **others: Any) -> ScriptedCompleter:
    return ScriptedCompleter(passes, origin=origin, **others)


async def ask(
    completer: Completer, body: dict[str, Any], last: str | None = None, card: ModelCard = CARD, **settings: Any
) -> httpx.Response:
    """The answer of a gateway that was started for this request alone."""
    gateway = Gateway(completer, card, Metrics(card.name), healthy, replace(HttpConfig(), **settings))
    transport = httpx.ASGITransport(create_app(gateway), raise_app_exceptions=False)
    headers = {b"Content-Type": b"application/json"}
    if last is not None:
        headers[b"Last-Event-ID"] = last.encode("latin-1")
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.post(CHAT if "messages" in body else TEXT, content=json.dumps(body), headers=headers)


async def stream(completer: Completer, body: dict[str, Any], last: str | None = None, **others: Any) -> list[str]:
    """The events of a resumable stream, each with its lines."""
    options = {**body.get("stream_options", {}), "resumable": True}
    response = await ask(completer, {**body, "stream": True, "stream_options": options}, last, **others)
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")
    return [f"{event}\n\n" for event in response.text.split("\n\n")[:-1]]


def id_of(event: str) -> str:
    found = re.match("id: (.+)\n", event)
    assert found is not None, event
    return found[1]


def shown(events: list[str]) -> dict[int, list[Any]]:
    """By choice what a client is told: neither what it cost, nor the last bits of a float."""
    choices: dict[int, list[Any]] = {}
    for event in events[:-1]:
        document = json.loads(event.partition("data: ")[2])
        usage = (document.get("usage") or {}).get("completion_tokens")
        for choice in document["choices"] or [{"index": -1}]:
            told = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.3f}", json.dumps(choice))
            told = re.sub(r"call_[0-9a-f]+", "call", told)
            choices.setdefault(choice["index"], []).append((document["id"], document["created"], usage, told))
    return choices


async def check_every_cut(completer: Completer, body: dict[str, Any], **settings: Any) -> None:
    whole = await stream(completer, body, **settings)
    for num_seen in range(1, len(whole)):
        rest = await stream(completer, body, id_of(whole[num_seen - 1]), stream_chunk="pass", **settings)
        assert shown(whole[:num_seen] + rest) == shown(whole), f"cut behind event {num_seen}"
        if body.get("n", 1) == 1 and not {"logprobs", "stream_options", "tools"} & set(body):
            assert rest == whole[num_seen:], f"cut behind event {num_seen}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(models: ModelDirectories) -> AsyncGenerator[LocalCompleter, None]:
    async with server(ModelConfig(models.chat_target, num_slots=2, num_threads=1), model_id="m") as completer:
        yield completer


WIND = {"prompt": "the wind", "max_tokens": 8, "temperature": 0.8, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "nobody chose a seed": WIND,
    "seed, penalties": {**WIND, "seed": -3, "presence_penalty": 1.5},
    "chat": {"messages": [HELLO], "max_tokens": 6},
    "halves of characters": {**WIND, "temperature": 2.0, "seed": 4},
    "a stop string holds text back": {**WIND, "stop": ["never said", "e"], "seed": 1},
    "logprobs": {**WIND, "logprobs": 2, "echo": True},
    "chat with logprobs": {"messages": [HELLO], "max_tokens": 6, "logprobs": True, "top_logprobs": 1},
    "the prompt alone": {"prompt": "the wind", "max_tokens": 0, "echo": True},
    "usage": {**WIND, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "speculation": {**WIND, "stream_options": {"include_speculation": True}, "temperature": 0},
    "choices": {**WIND, "n": 3, "max_tokens": 4, "stream_options": {"include_usage": True}},
    "prompts": {**WIND, "prompt": ["the", "wind"], "n": 2, "max_tokens": 3},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_stream_cut_anywhere_goes_on(real: LocalCompleter, body: dict[str, Any]) -> None:
    await check_every_cut(real, body)


async def test_reasoning_and_calls_go_on() -> None:
    """Their readers hold text back too, and a call's beginning is told once."""
    thinking = replace(CARD, chat_template=THINKING)
    texts = ["I th", "ink.</th", "ink> So", " be", " it"]
    await check_every_cut(scripted([[text] for text in texts], prompt="x<think>"), {"messages": [HELLO]}, card=thinking)
    calling = scripted([[text] for text in TWO], reason=FinishReason.STOP)
    await check_every_cut(calling, {"messages": [HELLO], "tools": [tool()]}, tool_call_parser="hermes")


async def test_a_stream_without_ids_is_as_it_was() -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    plain = (await ask(scripted(), body)).text
    assert "id: " not in plain
    with_ids = "".join(await stream(scripted(), body))

    def without(text: str) -> str:
        return re.sub(r"cmpl-[0-9a-f]+|\"created\":\d+", "", re.sub(r"^id: .*\n", "", text, flags=re.MULTILINE))

    assert without(with_ids) == without(plain)
    assert with_ids != plain


async def test_a_header_asks_for_ids_too_and_a_stop_of_the_stream_is_no_news() -> None:
    """An empty one, since there is no last event yet."""
    body = {"prompt": "x", "stream": True}
    events = [f"{event}\n\n" for event in (await ask(scripted(), body, "")).text.split("\n\n")[:-1]]
    assert len(events) == 7
    rest = await ask(scripted(), body, id_of(events[1]))
    assert rest.text == "".join(events[2:])
    assert (await ask(scripted(), body, id_of(events[5]))).text == "data: [DONE]\n\n"


async def whole_of(completer: Completer, **fields: Any) -> list[str]:
    return await stream(completer, {"prompt": "x", **fields})


FOREIGN: dict[str, Callable[[str], str]] = {
    "of another kind of server": lambda _: "42",
    "with more behind it": lambda last: f"{last}0",
    "of another version": lambda last: f"2{last[1:]}",
    "too long": lambda last: last + "0" * MAX_ID_CHARACTERS,
    "with characters beyond ASCII": lambda last: re.sub(r":\d-0:", ":\xb3-0:", last),
    "with numbers for more choices": lambda last: re.sub(r"(:\d+)(-\d+:)", r"\1-0\2", last),
    "with another digest": lambda last: last[:-1] + ("0" if last[-1] != "0" else "1"),
    "of another model": lambda last: last.replace(":m:", ":m2:"),
    "beyond the end": lambda last: re.sub(r":\d+-0:", ":7-0:", last),
    "beyond any end": lambda last: re.sub(r":\d+-0:", ":9999999999-0:", last),
    "behind the usage of an answer that has none": lambda last: re.sub(r":\d+-0:", ":0-1:", last),
}


@pytest.mark.parametrize("name", FOREIGN)
async def test_an_id_of_something_else_is_refused_before_any_text(name: str) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"resumable": True}}
    last = id_of((await stream(scripted(), body))[2])
    completer = scripted()
    response = await ask(completer, body, FOREIGN[name](last))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (409, "resume_mismatch", "last-event-id")
    assert completer.num_running == 0


@pytest.mark.parametrize("change", [
    {"prompt": "y"}, {"temperature": 1.0}, {"max_tokens": 17}, {"seed": 0}, {"logprobs": 1}, {"stop": ["b"]},
    {"stream_options": {"include_usage": True}},
])  # fmt: skip
async def test_another_body_is_refused_though_the_text_would_be_the_same(change: dict[str, Any]) -> None:
    """Temperature 1 is what it was, but the target's operator may say otherwise to those who say nothing."""
    last = id_of((await whole_of(scripted()))[2])
    completer = scripted()
    body = {"prompt": "x", "stream": True, "stream_options": {"resumable": True}, **change}
    assert (await ask(completer, body, last)).status_code == 409
    assert not completer.requests


@pytest.mark.parametrize("other", [
    [["Once", " upon"], [" the", " time", ""], ["!"]],
    [["Once", " upon a"], ["", " time", ""], ["!"]],
    [["Once", " upon"], [" a"]],
])  # fmt: skip
async def test_an_answer_that_has_become_another_is_refused(other: list[list[str]]) -> None:
    last = id_of((await whole_of(scripted()))[3])
    completer = scripted(other)
    body = {"prompt": "x", "stream": True, "stream_options": {"resumable": True}}
    assert (await ask(completer, body, last)).status_code == 409
    assert completer.num_running == 0


@pytest.mark.parametrize("origin", [Provenance("m2", "", "d"), Provenance("m", "1", "d"), Provenance("m", "", "e")])
async def test_another_model_grammar_or_prompt_is_refused_though_its_text_is_the_same(origin: Provenance) -> None:
    last = id_of((await whole_of(scripted()))[3])
    body = {"prompt": "x", "stream": True, "stream_options": {"resumable": True}}
    assert (await ask(scripted(origin=origin), body, last)).status_code == 409


async def test_where_nobody_could_go_on_it_is_said_at_once() -> None:
    """A device's noise knows no seeds: what draws it names no model, or refuses the seed that is pinned for it."""
    body = {"prompt": "x", "stream": True, "stream_options": {"resumable": True}}
    no_seeds = errors.InvalidRequestError("seed: this server samples on the device", field="seed")
    for completer in (scripted(origin=Provenance()), scripted([], error=no_seeds)):
        response = await ask(completer, body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "not_resumable")
        assert completer.num_running == 0


async def test_notes_of_a_client_may_be_no_unicode() -> None:
    body = {"prompt": "x", "metadata": {"note": "\ud800"}}
    whole = await stream(scripted(), body)
    assert await stream(scripted(), body, id_of(whole[2])) == whole[3:]


async def test_only_a_stream_is_resumed() -> None:
    response = await ask(scripted(), {"prompt": "x"}, "42")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")


async def test_a_silent_stream_gets_comments_without_a_place() -> None:
    slow = scripted([["a"], ["b"]], gap_s=0.15)
    events = await stream(slow, {"prompt": "x"}, sse_ping_s=0.05)
    told = [event for event in events if event != ":\n\n"]
    assert len(told) == 3 < len(events)
    rest = await stream(slow, {"prompt": "x"}, id_of(told[0]), sse_ping_s=0.05)
    assert [event for event in rest if event != ":\n\n"] == told[1:]


async def test_a_failure_in_a_stream_has_no_place_either() -> None:
    failing = scripted(PASSES[:2], error=errors.UnavailableError("gone"))
    *told, failure, _ = await whole_of(failing)
    assert '"code":"unavailable"' in failure
    assert failure.startswith("data: ")
    rest = await stream(scripted(), {"prompt": "x"}, id_of(told[-1]))
    assert len(told) + len(rest) == 7


async def test_seeds_that_nobody_chose_are_the_same_again() -> None:
    first, second = scripted(), scripted()
    whole = await stream(first, {"prompt": "x", "n": 2})
    await stream(second, {"prompt": "x", "n": 2}, id_of(whole[4]))
    seeds = [request.seed for request in first.requests]
    assert seeds == [request.seed for request in second.requests]
    assert len(set(seeds)) == 2, "choices are no copies of each other"


class Uneven(ScriptedCompleter):
    """The first choice is slow, all others are quick."""

    async def complete(self, request: Any) -> AsyncGenerator[Any, None]:
        async for event in super().complete(request):
            await asyncio.sleep(0.1 * (request.seed == 5))
            yield event


async def test_choices_that_are_ahead_wait_for_the_others_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "x", "n": 2, "seed": 5}
    whole = await stream(scripted(), body)
    last = next(id_of(event) for event in whole if id_of(event).split(":")[6].startswith("3-"))
    assert shown(await stream(Uneven(PASSES, origin=ORIGIN), body, last))
    monkeypatch.setattr(resumable, "MAX_HELD_BYTES", 300)
    completer = Uneven(PASSES, origin=ORIGIN)
    asked = {**body, "stream": True, "stream_options": {"resumable": True}}
    response = await ask(completer, asked, last)
    assert (response.status_code, completer.num_running) == (409, 0)
