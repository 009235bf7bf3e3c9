"""Fields of vLLM's API: those that are obeyed, and the reasons for those that are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from specdec.inference.text.chat import Chat
from tests.support.completers import ScriptedCompleter
from tests.unit.gateway.test_app import PASSES, client_of, events, post

MESSAGES = [{"role": "user", "content": "one two"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one three"},
    "/v1/chat/completions": {"messages": MESSAGES},
}


def ids_of(document: dict[str, Any], path: str) -> Any:
    """Return the prompt's token ids from where vLLM puts them: a chat answer's top level, else the first choice."""
    return document.get("prompt_token_ids") if "chat" in path else document["choices"][0].get("prompt_token_ids")


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream_chunk", ["token", "pass"])
async def test_token_ids_come_whole_and_in_a_stream(path: str, stream_chunk: str) -> None:
    body = {**ASKED[path], "return_token_ids": True, "n": 2}
    whole = (await post(ScriptedCompleter(PASSES), path, body)).json()
    prompt = [1, 3, 5] if "chat" not in path else [1, 3, 3]
    assert ids_of(whole, path) == prompt
    ids = [choice["token_ids"] for choice in whole["choices"]]
    assert len(ids[0]) == whole["usage"]["completion_tokens"] // 2 == 6
    chunks = events(await post(ScriptedCompleter(PASSES), path, {**body, "stream": True}, stream_chunk=stream_chunk))
    for index in range(2):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert ids_of(mine[0], path) == prompt
        assert not any(ids_of(chunk, path) for chunk in mine[1:])
        assert [each for chunk in mine for each in chunk["choices"][0]["token_ids"]] == ids[index]
    silent = (await post(ScriptedCompleter(PASSES), path, ASKED[path])).text
    assert "token_ids" not in silent


async def test_each_prompt_has_its_own_ids_and_ids_are_those_that_were_sent() -> None:
    body = {"prompt": [[7, 8], [9]], "n": 2, "return_token_ids": True}
    choices = (await post(ScriptedCompleter(PASSES), "/v1/completions", body)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[7, 8], [7, 8], [9], [9]]


@pytest.mark.parametrize(("path", "prefix"), [("/v1/completions", "cmpl"), ("/v1/chat/completions", "chatcmpl")])
async def test_an_answers_id_ends_with_the_requests(path: str, prefix: str) -> None:
    document = (await post(ScriptedCompleter(PASSES), path, {**ASKED[path], "request_id": "job-7"})).json()
    assert document["id"] == f"{prefix}-job-7"
    for wrong in ("", "a b", "a\n", "x" * 129):
        refused = await post(ScriptedCompleter(PASSES), path, {**ASKED[path], "request_id": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_the_end_of_the_prompt_reaches_the_template(path: str) -> None:
    asked = {"messages": MESSAGES} if "chat" in path else {"input": "one two"}
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    completer = ScriptedCompleter(PASSES)
    assert (await post(completer, path, {**asked, **ends})).status_code == 200
    prompt = completer.requests[-1].prompt
    assert isinstance(prompt, Chat)
    assert prompt.template_kwargs() == ends
    both = await post(completer, path, {**asked, "continue_final_message": True})
    assert (both.status_code, "add_generation_prompt: false" in both.text) == (400, True)
    usual = {"add_generation_prompt": True, "continue_final_message": False}
    assert (await post(completer, path, {**asked, **usual})).status_code == 200
    assert completer.requests[-1].prompt == Chat.of(("user", "one two"))


REFUSED = {
    "allowed_token_ids": [5],
    "bad_words": ["five"],
    "detokenize": False,
    "include_stop_str_in_output": True,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 5,
}


@pytest.mark.parametrize("path", ASKED)
async def test_a_refused_field_says_what_to_do_instead(path: str) -> None:
    async with client_of(ScriptedCompleter(PASSES)) as client:
        for name, value in {**REFUSED, **({"echo": True} if "chat" in path else {})}.items():
            error = (await client.post(path, json={**ASKED[path], name: value})).json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            assert re.search("; .*(ids|append|logit_bias|echo)", error["message"])


async def test_responses_have_no_place_for_them() -> None:
    for name, value in (("return_token_ids", True), ("request_id", "a")):
        answer = await post(ScriptedCompleter(PASSES), "/v1/responses", {"input": "x", name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
