"""Fields of other servers' APIs are accepted with values that change no answer; errors about others list those."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.inference.gateway.bodies import noops
from specdec.inference.gateway.bodies.noops import NoOps
from tests.support.completers import ScriptedCompleter
from tests.unit.gateway.test_app import PASSES, client_of, post

HELLO = {"role": "user", "content": "x"}
BODIES: dict[str, tuple[dict[str, Any], NoOps]] = {
    "/v1/completions": ({"prompt": "x"}, noops.COMPLETION),
    "/v1/chat/completions": ({"messages": [HELLO]}, noops.CHAT),
}
OFF = [(path, name, value) for path, (_, each) in BODIES.items() for name, values in each.items() for value in values]


@pytest.mark.parametrize("path", BODIES)
async def test_every_value_that_changes_nothing_is_taken(path: str) -> None:
    completer = ScriptedCompleter(PASSES)
    async with client_of(completer) as client:
        for name, value in ((name, value) for where, name, value in OFF if where == path):
            response = await client.post(path, json={**BODIES[path][0], name: value})
            assert response.is_success, (name, value, response.text)
    assert len({(request.prompt, request.sampling, request.stop) for request in completer.requests}) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_any_other_value_is_refused_by_name(path: str) -> None:
    body, fields = BODIES[path]
    completer = ScriptedCompleter(PASSES)
    async with client_of(completer) as client:
        for name in fields:
            error = (await client.post(path, json={**body, name: "another"})).json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            assert '"another" is not supported here' in error["message"]
            assert all(json.dumps(value) in error["message"] for value in fields[name])
    assert not completer.requests


@pytest.mark.parametrize(("name", "value"), [("best_of", True), ("store", 0), ("length_penalty", 1.5)])
async def test_numbers_are_compared_as_json_has_them(name: str, value: object) -> None:
    response = await post(ScriptedCompleter(PASSES), "/v1/completions", {"prompt": "x", name: value})
    assert response.status_code == 400
    assert (await post(ScriptedCompleter(PASSES), "/v1/completions", {"prompt": "x", "best_of": 1.0})).is_success


async def test_sglangs_benchmark_is_served() -> None:
    """The requests that SGLang's benchmark sends are accepted.

    Regression: the benchmark's warm-up request has best_of 1, and was refused with status 400.
    """
    body = {"model": "tiny", "prompt": "x", "temperature": 0.0, "best_of": 1, "max_tokens": 6, "stream": False}
    assert (await post(ScriptedCompleter(PASSES), "/v1/completions", {**body, "ignore_eos": True})).is_success


MEANT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "an image": (
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
        "messages.0.content.1: a part of type image_url is not supported here: this model reads text alone",
    ),
    "no content at all": ([{"role": "user", "content": None}], "messages.0: content is needed"),
    "a call of old": ([{**HELLO, "function_call": {"name": "f"}}], "use tool_choice, and tool_calls in messages"),
}


@pytest.mark.parametrize(("messages", "part"), MEANT.values(), ids=MEANT)
async def test_missing_abilities_of_a_model_are_named(messages: list[dict[str, Any]], part: str) -> None:
    error = (await post(ScriptedCompleter(PASSES), "/v1/chat/completions", {"messages": messages})).json()["error"]
    assert (error["param"], part in error["message"]) == ("messages", True), error


async def test_an_answer_goes_back_as_a_message() -> None:
    """The message of an answer, with its empty fields, is accepted as a message of the next request."""
    empty: dict[str, Any] = {"refusal": None, "annotations": [], "audio": None, "tool_calls": [], "function_call": None}
    messages = [HELLO, {"role": "assistant", "content": "x", **empty}, HELLO]
    assert (await post(ScriptedCompleter(PASSES), "/v1/chat/completions", {"messages": messages})).is_success


async def test_an_error_repeats_little_of_what_came() -> None:
    """An error repeats only a little of the body that caused it.

    Regression: a body with an unknown field of 7 MB was answered with 14 MB, in `message` and in `param`.
    """
    for body in ({"x" * 9000: 1}, {"logit_bias": {"y" * 9000: 1}}):
        answer = await post(ScriptedCompleter(PASSES), "/v1/completions", {"prompt": "x", **body})
        assert answer.status_code == 400
        assert len(answer.content) < 1000
