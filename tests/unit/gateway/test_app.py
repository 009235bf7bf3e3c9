"""A gateway's API in OpenAI's formats, with its errors and limits, over scripted answers instead of a model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from specdec.inference import VERSION, errors
from specdec.inference.commit import Delta, TextEvent
from specdec.inference.gateway.answers import stream
from specdec.inference.gateway.app import create_app
from specdec.inference.gateway.requests import MAX_AT_ONCE
from specdec.inference.request import SamplingParams
from specdec.inference.text.chat import Chat
from specdec.inference.workers.completion import CompletionRequest, ModelCard
from tests.support import llmperf
from tests.support.completers import CARD, REJECTED, ScriptedCompleter, gateway

PASSES = [["Once", " upon"], [" a", " time", ""], ["!"]]
TEXT = "Once upon a time!"


@asynccontextmanager
async def client_of(
    completer: ScriptedCompleter, card: ModelCard = CARD, *, raises: bool = False, **settings: Any
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """Yield an HTTP client of a gateway over a completer; with `raises`, the gateway's exceptions reach the test."""
    served = gateway(completer, **settings)
    served.card = card
    transport = httpx.ASGITransport(create_app(served), raise_app_exceptions=raises)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def post(
    completer: ScriptedCompleter, path: str, body: Any, card: ModelCard = CARD, **settings: Any
) -> httpx.Response:
    async with client_of(completer, card, **settings) as client:  # json= would not send half of a surrogate pair
        return await client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the JSON documents of a stream, which must have only data lines and end with [DONE]."""
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_completion_has_openais_shape() -> None:
    completer = ScriptedCompleter(PASSES)
    document = (await post(completer, "/v1/completions", {"model": "tiny", "prompt": "x"})).json()
    assert document["object"] == "text_completion"
    assert document["id"].startswith("cmpl-")
    assert document["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}]
    assert document["usage"]["prompt_tokens"] == 3
    assert document["usage"]["completion_tokens"] == 6
    assert document["usage"]["total_tokens"] == 9
    details = document["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}  # there was no prediction
    assert document["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert document["metrics"] == SPECULATION


SPECULATION = {
    "speculative_decoding": {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 1, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 6,
        "num_spec_tokens": 3,
    }
}
"""Counts of PASSES in vLLM's form: passes with 2, 3 and 1 draft tokens, all but the last of each accepted."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream_chunk", ["token", "pass"])
async def test_the_usage_of_a_stream_has_metrics_beside_it(path: str, stream_chunk: str) -> None:
    asked = {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    *others, last = events(await post(ScriptedCompleter(PASSES), path, body, stream_chunk=stream_chunk))
    assert (last["metrics"], last["choices"]) == (SPECULATION, [])
    assert not [each for each in others if "metrics" in each]


async def test_choices_are_summed_up_and_no_draft_has_no_metrics() -> None:
    both = (await post(ScriptedCompleter(PASSES), "/v1/completions", {"prompt": "x", "n": 2})).json()["metrics"]
    assert both["speculative_decoding"]["acceptance_histogram"] == [2, 2, 2, 0]
    assert both["speculative_decoding"]["draft_acceptance_rate"] == 0.5
    assert "metrics" not in (await post(Undrafted(PASSES), "/v1/completions", {"prompt": "x"})).json()


class Undrafted(ScriptedCompleter):
    """Completer whose answers have no draft tokens."""

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        async for event in super().complete(request):
            yield replace(event, num_draft_tokens=0, num_accepted_tokens=0) if isinstance(event, Delta) else event


async def test_a_salt_is_passed_on_within_its_limits() -> None:
    completer = ScriptedCompleter(PASSES)
    assert (await post(completer, "/v1/completions", {"prompt": "x", "cache_salt": "a" * 256})).status_code == 200
    assert completer.requests[-1].cache_salt == "a" * 256
    for salt in ("", "a" * 257, 5):
        response = await post(completer, "/v1/completions", {"prompt": "x", "cache_salt": salt})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")


async def test_a_chat_completion_has_openais_shape() -> None:
    completer = ScriptedCompleter(PASSES)
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    document = (await post(completer, "/v1/chat/completions", {"messages": messages})).json()
    assert document["object"] == "chat.completion"
    message = {"role": "assistant", "content": TEXT, "refusal": None}
    assert document["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    (request,) = completer.requests
    assert request.prompt == Chat.of(("system", ""), ("user", "hi"))
    assert request.max_new_tokens == 128, "without a limit, to the end of the context"


async def test_defaults_are_openais() -> None:
    completer = ScriptedCompleter(PASSES)
    await post(completer, "/v1/completions", {"prompt": "x", "seed": None, "stop": None})
    (request,) = completer.requests
    assert request.sampling == SamplingParams(temperature=1.0)
    assert (request.max_new_tokens, request.seed, request.logprobs, request.ignore_eos) == (16, None, None, False)


async def test_every_field_reaches_the_completer() -> None:
    completer = ScriptedCompleter(PASSES)
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "gamma": 2,
        "presence_penalty": 0.25, "frequency_penalty": -1, "logit_bias": {"5": 3, "2": -100}, "seed": 2**64 - 1, "n": 2,
        "stop": ["a", "b"], "stop_token_ids": [4], "ignore_eos": True, "max_tokens": 9, "logprobs": 3, "user": "me",
        "min_tokens": 5,
    }  # fmt: skip
    assert (await post(completer, "/v1/completions", {"prompt": [[5, 6], [7]], **fields})).status_code == 200
    first, second, third, fourth = completer.requests
    assert first.sampling == SamplingParams(0.5, 7, 0.9, 0.1, 0, 1.5, 0.25, -1.0, ((2, -100.0), (5, 3.0)))
    assert [first.seed, second.seed] == [2**64 - 1, 0]
    assert (first.stop, first.stop_token_ids, first.ignore_eos) == (("a", "b"), frozenset([4]), True)
    assert (first.min_new_tokens, first.max_new_tokens, first.logprobs, first.gamma) == (5, 9, 3, 2)
    assert [request.prompt for request in (first, second, third, fourth)] == [(5, 6), (5, 6), (7,), (7,)]


@pytest.mark.parametrize(("chunk", "texts"), [
    ("token", ["Once", " upon", " a", " time", "", "!"]),
    ("pass", ["Once upon", " a time", "!"]),
])  # fmt: skip
async def test_a_stream_has_one_event_per_token_or_pass(chunk: str, texts: list[str]) -> None:
    """A stream has an event per token or per pass, as configured, and reports draft tokens only on request."""
    completer, body = ScriptedCompleter(PASSES), {"prompt": "x", "stream": True}
    response = await post(completer, "/v1/completions", body, stream_chunk=chunk)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == texts
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(texts) - 1) + ["length"]
    assert not [chunk for chunk in chunks if {"usage", "speculation"} & chunk.keys()]
    assert not completer.requests[-1].include_rejected
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_chat_stream_has_role_once_and_usage() -> None:
    options = {"include_usage": True, "include_speculation": True}
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": options}
    *chunks, last = events(await post(ScriptedCompleter(PASSES), "/v1/chat/completions", body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "Once"}
    assert deltas[1:] == [{"content": text} for text in (" upon", " a", " time", "", "!")]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    accepted = [chunk["speculation"]["accepted"] for chunk in chunks]
    assert accepted == [[True], [False], [True], [True], [False], [False]]
    assert [chunk["speculation"]["num_draft_tokens"] for chunk in chunks] == [0, 2, 0, 0, 3, 1]
    assert [chunk["speculation"]["token_ids"] for chunk in chunks] == [[7]] * 6
    ends = [chunk["speculation"] for chunk in chunks if "timings" in chunk["speculation"]]
    assert [(end["rejected"], end["timings"]["compute_us"]) for end in ends] == [(REJECTED, 20)] * 3


async def test_echo_and_logprobs_in_both_shapes() -> None:
    completer = ScriptedCompleter([["é", "x"]])
    echoed = (await post(completer, "/v1/completions", {"prompt": "x", "echo": True})).json()
    assert echoed["choices"][0]["text"] == "prompt éx"
    old = (await post(completer, "/v1/completions", {"prompt": "x", "logprobs": 1})).json()["choices"][0]["logprobs"]
    assert old == {
        "tokens": ["é", "x"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"é": -0.5}, {"x": -0.5}],
        "text_offset": [0, 1],
    }
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    new = (await post(completer, "/v1/chat/completions", body)).json()["choices"][0]["logprobs"]
    entry = {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}
    assert new["content"][0] == {**entry, "top_logprobs": [entry]}


async def test_lm_eval_scores_the_prompt() -> None:
    """A request with max_tokens 0, echo and logprobs gets only the prompt's tokens and log-probabilities."""
    completer = ScriptedCompleter(PASSES)
    body = {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1}
    document = (await post(completer, "/v1/completions", body)).json()
    assert (document["choices"][0]["text"], document["choices"][0]["finish_reason"]) == ("prompt ", "length")
    assert document["choices"][0]["logprobs"] == {
        "tokens": ["pro", "mpt", " "],
        "token_logprobs": [None, -1.5, -2.5],
        "top_logprobs": [None, {"x": -0.25, "mpt": -1.5}, {"x": -0.25, " ": -2.5}],
        "text_offset": [0, 3, 6],
    }
    assert document["usage"]["completion_tokens"] == 0
    (request,) = completer.requests
    assert (request.max_new_tokens, request.prompt_logprobs) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_has_those_of_prompt_and_answer(stream: bool) -> None:
    body = {"prompt": "x", "echo": True, "logprobs": 0, "stream": stream}
    answer = await post(ScriptedCompleter([["é", "!"]]), "/v1/completions", body)
    documents = events(answer) if stream else [answer.json()]
    found = [document["choices"][0]["logprobs"] for document in documents]
    assert [each for logprobs in found for each in logprobs["tokens"]] == ["pro", "mpt", " ", "é", "!"]
    assert [each for logprobs in found for each in logprobs["text_offset"]] == [0, 3, 6, 7, 8]
    assert [each for logprobs in found for each in logprobs["token_logprobs"]] == [None, -1.5, -2.5, -0.5, -0.5]


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    body = {"prompt": ["x", "y"], "n": 2}
    document = (await post(ScriptedCompleter(PASSES), "/v1/completions", body)).json()
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2, 3]
    assert document["usage"]["prompt_tokens"] == 6, "every prompt counts once"
    assert document["usage"]["completion_tokens"] == 24
    chunks = events(await post(ScriptedCompleter(PASSES), "/v1/completions", {**body, "stream": True}))
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(4)]
    assert texts == [TEXT] * 4


async def test_choices_of_one_request_do_not_fill_the_queue() -> None:
    """The choices of one request are generated a few at a time, so that they never fill slots and queue.

    Regression: 2 prompts with n 64, within the limits, exceeded slots and queue, and got status 429.
    """
    completer = ScriptedCompleter([["a"]], gap_s=0.005)
    asking = asyncio.create_task(post(completer, "/v1/completions", {"prompt": ["a", "b"], "n": 64}))
    most = 0
    while not asking.done():
        most = max(most, completer.num_running)
        await asyncio.sleep(0)
    assert len((await asking).json()["choices"]) == 128
    assert 1 < most <= MAX_AT_ONCE


HELLO = {"role": "user", "content": "x"}
REFUSED = {
    "unknown field": ({"prompt": "x", "best_of": 3}, "best_of", "not supported"),
    "unknown stream option": ({"prompt": "x", "stream": True, "stream_options": {"x": 1}}, "stream_options", "x"),
    "no prompt": ({}, "prompt", "required"),
    "prompt of the wrong kind": ({"prompt": {"a": 1}}, "prompt", "expected"),
    "mixed prompt": ({"prompt": ["a", 3]}, "prompt", "expected"),
    "empty list": ({"prompt": []}, "prompt", "expected"),
    "temperature": ({"prompt": "x", "temperature": 101}, "temperature", "to 100, not 101"),
    "temperature as text": ({"prompt": "x", "temperature": "hot"}, "temperature", 'number, not "hot"'),
    "top_p": ({"prompt": "x", "top_p": 0}, "top_p", "0"),
    "n": ({"prompt": "x", "n": 65}, "n", "64"),
    "choices": ({"prompt": ["x"] * 10, "n": 13}, "n", "128"),
    "stop": ({"prompt": "x", "stop": ["a"] * 17}, "stop", "expected"),
    "empty stop": ({"prompt": "x", "stop": ""}, "stop", "expected"),
    "logprobs": ({"prompt": "x", "logprobs": 21}, "logprobs", "20"),
    "max_tokens": ({"prompt": "x", "max_tokens": 0}, "max_tokens", "1"),
    "logit_bias of no token": ({"prompt": "x", "logit_bias": {"the": 1}}, "logit_bias", "pattern"),
    "logit_bias of a token beyond 32 bits": ({"prompt": "x", "logit_bias": {"9999999999": 1}}, "logit_bias", "pattern"),
    "logit_bias of a line": ({"prompt": "x", "logit_bias": {"5\n": 1}}, "logit_bias", "pattern"),
    "logit_bias": ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "100"),
    "max_tokens without echo": ({"prompt": "x", "max_tokens": 0, "echo": False}, "max_tokens", "needs echo"),
    "min_tokens": ({"prompt": "x", "min_tokens": -1}, "min_tokens", "0"),
    "stream_options without stream": (
        {"prompt": "x", "stream_options": {"include_usage": True}},
        "stream_options",
        "stream",
    ),
    "no messages": ({"messages": []}, "messages", ""),
    "tools": ({"messages": [HELLO], "tools": [{"type": "function"}]}, "tools", ""),
    "format": ({"messages": [HELLO], "response_format": {"type": "xml"}}, "response_format", ""),
    "schema": ({"messages": [HELLO], "response_format": {"type": "json_schema"}}, "response_format", ""),
    "two grammars": ({"messages": [HELLO], "guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", ""),
    "no choice": ({"messages": [HELLO], "guided_choice": []}, "guided_choice", ""),
    "two structured": (
        {"messages": [HELLO], "structured_outputs": {"regex": "a", "json": {}}},
        "structured_outputs",
        "exactly one",
    ),
    "search": ({"messages": [HELLO], "web_search_options": {}}, "web_search_options", "among tools"),
    "thinking": ({"messages": [HELLO], "think": False}, "think", "chat_template_kwargs"),
    "top_logprobs alone": ({"messages": [HELLO], "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
}


@pytest.mark.parametrize(("body", "param", "part"), REFUSED.values(), ids=REFUSED)
async def test_a_bad_body_is_refused_by_field(body: dict[str, Any], param: str | None, part: str) -> None:
    completer = ScriptedCompleter(PASSES)
    response = await post(completer, "/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert part in error["message"]
    assert not completer.requests


UNREACHABLE = errors.UnavailableError(
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:5: connection refused",
    address="10.0.0.7:5",
)
"""Error with two addresses of servers, neither of which clients may read; once only the first was removed."""
FAILURES = {
    "too long": (errors.ContextLengthError("This model's maximum context length is 128"), 400, None, None),
    "invalid": (
        errors.InvalidRequestError("the prompt has 500 tokens", field="prompt", address="127.0.0.1:5"),
        400,
        "prompt",
        None,
    ),
    "full": (errors.CapacityError("all 8 slots are busy", retry_after_s=1.2), 429, None, "2"),
    "gone": (errors.UnavailableError("the server is shutting down"), 503, None, None),
    "unreachable": (UNREACHABLE, 503, None, "5"),
    "untrusted": (errors.HandshakeError("certificate has expired", address="127.0.0.1:5"), 503, None, None),
    "late": (errors.DeadlineError("too late"), 504, None, None),
    "ours": (errors.InternalError("the model failed"), 500, None, None),
    "unexpected": (RuntimeError("secret"), 500, None, None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "param", "retry_after"), FAILURES.values(), ids=FAILURES)
async def test_a_failure_before_the_first_token_is_a_status(
    error: Exception, status: int, param: str | None, retry_after: str | None, stream: bool
) -> None:
    response = await post(ScriptedCompleter([], error=error), "/v1/completions", {"prompt": "x", "stream": stream})
    told = response.json()["error"]
    assert (response.status_code, told["param"]) == (status, param)
    assert response.headers.get("retry-after") == retry_after
    assert "127.0.0.1" not in told["message"]
    assert "secret" not in told["message"]


async def test_a_later_failure_is_an_event_of_the_stream() -> None:
    completer = ScriptedCompleter(PASSES, error=errors.UnavailableError("the server is shutting down"))
    *_, last = events(await post(completer, "/v1/completions", {"prompt": "x", "stream": True}))
    assert last["error"]["message"] == "the server is shutting down"


async def test_an_upstream_deadline_has_the_same_words() -> None:
    completer = ScriptedCompleter(PASSES, error=errors.DeadlineError("Deadline Exceeded", address="10.0.0.7:5"))
    response = await post(completer, "/v1/completions", {"prompt": "x"}, deadline_s=60.0)
    assert response.json()["error"]["message"] == "the request is not finished after 60 s"


@pytest.mark.parametrize(("header", "status"), [("0.05", 504), ("0", 400), ("soon", 400), ("nan", 400), ("60", 200)])
async def test_a_request_may_bring_its_own_deadline(header: str, status: int) -> None:
    async with client_of(ScriptedCompleter(PASSES, gap_s=0.1)) as client:
        response = await client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Deadline-S": header})
    assert response.status_code == status


async def test_one_failed_choice_ends_the_others() -> None:
    completer = ScriptedCompleter([], error=errors.CapacityError("full", retry_after_s=1.0))
    response = await post(completer, "/v1/completions", {"prompt": "x", "n": 3})
    assert (response.status_code, completer.num_running) == (429, 0)


async def test_a_body_above_the_limit_is_refused() -> None:
    async def endless() -> AsyncGenerator[bytes, None]:
        for _ in range(10):
            yield b"x" * 100
            await asyncio.sleep(0)

    async with client_of(ScriptedCompleter(PASSES), max_body_mib=500 / 2**20) as client:
        told = await client.post("/v1/completions", json={"prompt": "x" * 600})
        omissions = await client.post("/v1/completions", content=endless())
    for response in (told, omissions):
        assert response.status_code == 413
        assert "500 bytes" in response.json()["error"]["message"]


async def test_a_model_is_known_by_name_or_path() -> None:
    for name in ("tiny", "/models/tiny", "someone/tiny/"):
        assert (await post(ScriptedCompleter(PASSES), "/v1/completions", {"model": name, "prompt": "x"})).is_success
    response = await post(ScriptedCompleter(PASSES), "/v1/completions", {"model": "other", "prompt": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    response = await post(ScriptedCompleter(PASSES), "/v1/completions", {"model": "x" * 5000, "prompt": "x"})
    assert len(response.text) < 500  # no client's megabyte comes back


async def test_an_adapter_is_a_model_by_name() -> None:
    completer = ScriptedCompleter(PASSES)
    async with client_of(completer, replace(CARD, adapters=("poet",))) as client:
        base, poet = (await client.get("/v1/models")).json()["data"]
        assert (base["id"], base["parent"], poet["id"], poet["parent"]) == ("tiny", None, "poet", "tiny")
        assert (await client.get("/v1/models/poet")).json() == poet
        for path, prompt in (
            ("completions", {"prompt": "x"}),
            ("chat/completions", {"messages": [HELLO]}),
            ("responses", {"input": "x"}),
        ):
            for name in ("poet", "tiny"):
                assert (await client.post(f"/v1/{path}", json={"model": name, **prompt})).json()["model"] == name
        assert [request.adapter for request in completer.requests] == ["poet", ""] * 3
        refused = (await client.post("/v1/completions", json={"model": "other", "prompt": "x"})).json()
        assert refused["error"]["message"] == "model other does not exist; tiny, poet are served"


async def test_paths_beside_generation() -> None:
    async with client_of(ScriptedCompleter(PASSES)) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ping")).status_code == (await client.post("/ping")).status_code == 200
        assert (await client.head("/metrics")).status_code == 200, "aiperf asks so whether there are any"
        assert (await client.get("/version")).json() == {"version": VERSION, "topology": "fused"}
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 128)
        assert (await client.get("/v1/models/tiny")).json() == model
        assert (await client.get("/v1/models/other")).status_code == 404
        assert "/v1/completions" in (await client.get("/openapi.json")).json()["paths"]
        page = await client.get("/")
        assert "Speculative decoding" in page.text
        assert not re.search(r"""(src|href)=["']?\w+:""", page.text.replace('href="data:,"', "")), "all is served here"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "script-src 'sha256-" in page.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "no-referrer"
        assert "https://" not in page.text
        missing = await client.get("/nothing")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
        wrong = await client.get("/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["message"] == "GET /v1/completions: Method Not Allowed; POST is expected"
    async with client_of(ScriptedCompleter(PASSES), no_page=True) as client:
        assert (await client.get("/")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", path) for path in ("/chat/completions", "/v1/v1/chat/completions", "/api/chat", "/completion")),
        *(("POST", path) for path in ("/messages", "/v1/v1/messages", "/v1/embeddings")),
        ("GET", "/api/tags"),
    ],
)
async def test_an_unknown_path_names_the_known_ones(method: str, path: str) -> None:
    """An unknown path gets an error that names the known ones.

    Regression: clients of other APIs, and those with a base_url without /v1, got a bare "Not Found".
    """
    async with client_of(ScriptedCompleter(PASSES)) as client:
        response = await client.request(method, path, json={})
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert message.startswith(f"{method} {path}: Not Found; this server speaks OpenAI's API: ")
        base = str(client.base_url) + ("/" if path.endswith("/messages") else "/v1")
        assert message.endswith(f"set base_url to {base}"), "Anthropic's clients add /v1 themselves"
        served = (await client.get("/openapi.json")).json()["paths"]
        named = set(re.findall(r"/v1/\S+?(?=,|;| )", message.partition("API:")[2].partition("; set")[0] + " "))
        assert {"/v1/chat/completions", "/v1/models", "/v1/messages"} <= named <= served.keys()


@pytest.mark.parametrize(
    ("path", "body", "name", "meant"),
    [
        ("/v1/chat/completions", {"messages": [HELLO]}, "max_token", "max_tokens"),
        ("/v1/chat/completions", {"messages": [HELLO]}, "temprature", "temperature"),
        ("/v1/completions", {"prompt": "x"}, "max_new_tokens", "max_tokens"),
        ("/v1/responses", {"input": "x"}, "max_output_token", "max_output_tokens"),
        ("/tokenize", {"prompt": "x"}, "add_special_token", "add_special_tokens"),
    ],
)
async def test_a_misspelt_field_names_the_one_meant(path: str, body: dict[str, Any], name: str, meant: str) -> None:
    async with client_of(ScriptedCompleter(PASSES)) as client:
        error = (await client.post(path, json={**body, name: 1})).json()["error"]
    assert error["message"] == f"{name} is not supported here (did you mean {meant}?)"
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields", [{"prediction": {"type": "content", "content": "1, 2"}}, {"keep_alive": "5m"}, {"keep_alive": -1}]
)
async def test_fields_that_change_no_answer_are_taken(fields: dict[str, Any]) -> None:
    """Fields of other servers that would change no answer are accepted.

    Regression: clients that always send a field such as `prediction`, or Ollama's `keep_alive`, got status
    400.
    """
    async with client_of(ScriptedCompleter(PASSES)) as client:
        answers = [
            (await client.post("/v1/chat/completions", json={"messages": [HELLO], **each})).json()
            for each in ({}, fields)
        ]
    plain, given = (answer["choices"] for answer in answers)
    assert plain == given


async def test_health_is_that_of_the_next_server() -> None:
    async def sick() -> bool:
        return False

    async with client_of(ScriptedCompleter(PASSES), is_healthy=sick) as client:
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/ping")).status_code == 503


async def test_a_refusal_leaves_the_connection_whole() -> None:
    """After a refused request, the client's connection can be used again.

    Regression: the refusal's exception did not take a traceback, which broke the connection after the answer was sent.
    """
    async with client_of(ScriptedCompleter(PASSES), raises=True) as client:
        assert (await client.post("/v1/completions", json={"model": "other", "prompt": "x"})).status_code == 404
        assert (await client.post("/v1/completions", json={"prompt": ["x"] * 10, "n": 13})).status_code == 400


async def test_a_too_long_prompt_has_the_known_code() -> None:
    words = "This model's maximum context length is 128 tokens, and the prompt ..."
    error = errors.ContextLengthError(words, field="prompt", address="10.0.0.7:5")
    for path, body, param in (
        ("/v1/completions", {"prompt": "x"}, "prompt"),
        ("/v1/chat/completions", {"messages": [HELLO]}, "messages"),
    ):
        response = await post(ScriptedCompleter([], error=error), path, body)
        told = response.json()["error"]
        assert (response.status_code, told["code"], told["param"]) == (400, "context_length_exceeded", param)
        assert told["message"].startswith("This model's maximum context length is 128 tokens")


async def test_every_answer_has_the_id_of_its_request() -> None:
    async with client_of(ScriptedCompleter(PASSES)) as client:
        for method, path, body in (
            ("POST", "/v1/completions", {"prompt": "x"}),
            ("POST", "/v1/completions", {"prompt": "x", "stream": True}),
            ("POST", "/v1/completions", {}),
            ("GET", "/nothing", None),
        ):
            answer = await client.request(method, path, json=body, headers={"X-Request-Id": "mine-1"})
            assert answer.headers["x-request-id"] == "mine-1"
        drawn = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
        assert len(set(drawn)) == 2
        harmful = await client.get("/health", headers={"X-Request-Id": "a" * 129})
        assert harmful.headers["x-request-id"] != "a" * 129


async def test_tokens_and_text_as_vllm_has_them() -> None:
    async with client_of(ScriptedCompleter(PASSES)) as client:
        answer = await client.post("/tokenize", json={"model": "tiny", "prompt": "a bc"})
        assert answer.json() == {"count": 3, "max_model_len": 128, "tokens": [1, 1, 2], "token_strs": None}
        bare = await client.post("/tokenize", json={"prompt": "a bc", "add_special_tokens": False})
        assert bare.json()["tokens"] == [1, 2]
        chat = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "abcd"}]})
        assert chat.json()["tokens"] == [1, 4]
        assert (await client.post("/detokenize", json={"tokens": [1, 2]})).json() == {"prompt": "x xx"}
        for body in ({}, {"prompt": "x", "messages": [HELLO]}, {"prompt": "x", "model": "other"}):
            assert (await client.post("/tokenize", json=body)).status_code in (400, 404)
    async with client_of(ScriptedCompleter(PASSES), codec=None) as client:
        assert (await client.post("/detokenize", json={"tokens": [1]})).status_code == 404


PATHS: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown field of an option": (
        "/v1/completions",
        {"prompt": "x", "stream": True, "stream_options": {"include_usages": True}},
        "stream_options.include_usages is not supported here (did you mean include_usage?)",
    ),
    "one of a union's member": (
        "/v1/completions",
        {"prompt": "x", "response_format": {"type": "json_object", "schema": {}}},
        "response_format.schema is not supported here (did you mean json_schema?)",
    ),
    "one in a choice": (
        "/v1/chat/completions",
        {"messages": [HELLO], "tool_choice": {"type": "function", "function": {"nam": "f"}}},
        "tool_choice.function.name: Field required",
    ),
    "a missing schema": (
        "/v1/completions",
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema: Field required",
    ),
    "a wrong part": (
        "/v1/chat/completions",
        {"messages": [HELLO, {"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages.1.content.0.text: ",
    ),
    "no text and no parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content: ",
    ),
    "an item": (
        "/v1/responses",
        {"input": [HELLO, {"role": "user", "content": [{"type": "text"}]}]},
        "input.1.content.0.text: ",
    ),
    "a call's arguments": (
        "/v1/responses",
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}]},
        "input.0.arguments: ",
    ),
    "no object": ("/v1/chat/completions", {"messages": [5]}, "messages.0: an object is expected, not 5"),
    "no item": ("/v1/responses", {"input": [5]}, "input.0: an item must be an object, not 5"),
    "a key": ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias.x: "),
    "a value": ("/v1/completions", {"prompt": "x", "logit_bias": {"7": 1000}}, "logit_bias.7: "),
    "a tool": ("/v1/chat/completions", {"messages": [HELLO], "tools": [{"type": "function"}]}, "tools.0.function: "),
    "a choice of grammars": (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"choices": ["a"]}},
        "structured_outputs.choices",
    ),
}


@pytest.mark.parametrize("name", PATHS)
async def test_paths_have_only_the_names_of_the_body(name: str) -> None:
    """The error about a field has its path in the body that was sent; a suggestion is about the path's last part.

    Regression: paths had validators' names, such as content.list[function-before[check(), TextPart]].0, and the name
    of a union's member; messages.1.id was asked whether it meant messages.
    """
    path, body, message = PATHS[name]
    error = (await post(ScriptedCompleter(PASSES), path, body)).json()["error"]
    assert error["message"].startswith(message), error["message"]
    assert not set("[( ") & set(error["message"].partition(":")[0].partition(" is not")[0])


@pytest.mark.parametrize("body", [b'{"prompt":"\xe9","max_tokens":1}', b'{"prompt":"' + b"x" * 70_000 + b'\xe9"}'])
async def test_a_body_that_is_not_utf8_names_the_byte(body: bytes) -> None:
    """The error about a body in Latin-1, as PowerShell 5 sends it, has the position of the first wrong byte.

    Regression: the error was only "There was an error parsing the body".
    """
    async with client_of(ScriptedCompleter(PASSES)) as client:
        answer = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert f"the body is not UTF-8: byte {body.index(0xE9)} is 0xe9" in error["message"]


async def test_minus_one_draws_a_seed() -> None:
    """A seed of -1 stands for a random one, as in vLLM and llama-server; other negative seeds are seeds as they are."""
    completer = ScriptedCompleter(PASSES)
    for seed in (-1, -2, None):
        assert (await post(completer, "/v1/completions", {"prompt": "x", "n": 2, "seed": seed})).is_success
    seeds = [request.seed for request in completer.requests]
    assert seeds == [None, None, 2**64 - 2, 2**64 - 1, None, None]


HALF = '"\\ud83d"'
HALVES = {
    "prompt": f'{{"prompt": {HALF}}}',
    "prompts": f'{{"prompt": ["x", {HALF}]}}',
    "stop": f'{{"prompt": "x", "stop": {HALF}}}',
    "model": f'{{"prompt": "x", "model": {HALF}}}',
    "format": f'{{"prompt": "x", "response_format": {{"type": {HALF}}}}}',
    "name": f'{{"prompt": "x", {HALF}: 1}}',
}


@pytest.mark.parametrize("body", HALVES.values(), ids=HALVES)
async def test_half_a_surrogate_pair_is_no_text(body: str) -> None:
    completer = ScriptedCompleter(PASSES)
    async with client_of(completer) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code in (400, 404)
    told = response.json()["error"]
    assert told["type"] == "invalid_request_error"
    assert told["param"] not in ("prompt", "stop") or "half of a surrogate pair" in told["message"]
    assert not completer.requests


ODD_TYPES = {
    "tools": ("/v1/chat/completions", f'{{"messages": [], "tools": [{{"type": {HALF}}}]}}'),
    "tool_choice": ("/v1/chat/completions", f'{{"messages": [], "tool_choice": {{"type": {HALF}}}}}'),
    "content": ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": [{{"type": {HALF}}}]}}]}}'),
    "input": ("/v1/responses", f'{{"input": [{{"type": {HALF}}}]}}'),
    "a name in input": ("/v1/responses", f'{{"input": [{{"type": "function_call", "name": {HALF}}}]}}'),
    "effort": ("/v1/chat/completions", f'{{"messages": [], "reasoning_effort": {HALF}}}'),
    "a field": ("/v1/chat/completions", f'{{"messages": [], {HALF}: 1}}'),
}


@pytest.mark.parametrize(("path", "body"), ODD_TYPES.values(), ids=ODD_TYPES)
async def test_half_a_surrogate_pair_is_no_name_of_a_kind_either(path: str, body: str) -> None:
    """A `type`, a name or a field with half of a surrogate pair gets status 400, wherever it stands in the body.

    Regression: an unknown type was quoted in an error that nothing could encode, and the answer was 500.
    """
    async with client_of(ScriptedCompleter(PASSES)) as client:
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content_type", "body", "words"),
    [
        ("text/plain", '{"prompt": "x"}', "Content-Type: application/json"),
        ("application/x-www-form-urlencoded", '{"prompt": "x"}', "Content-Type: application/json"),
        ("application/json", "{", "invalid_json"),
    ],
)
async def test_a_body_that_is_no_json_is_named(content_type: str, body: str, words: str) -> None:
    """The error about a body that is not JSON says so, for example for a form, as `curl -d` sends by default."""
    async with client_of(ScriptedCompleter(PASSES)) as client:
        response = await client.post("/v1/completions", content=body, headers={"content-type": content_type})
    assert response.status_code == 400
    assert words in str(response.json()["error"])


async def test_events_are_ascii() -> None:
    """Events are ASCII only, since httpx, which guidellm uses, takes U+2028 and U+0085 for ends of lines."""
    text = "a\u2028b\u0085c\u00e9\U0001f600"
    response = await post(ScriptedCompleter([[text]]), "/v1/completions", {"prompt": "x", "stream": True})
    assert response.content.isascii()
    lines = [line async for line in response.aiter_lines() if line]
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == text


async def test_usage_so_far_as_guidellm_asks_for_it() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "stream": True, "stream_options": options, "stop": None, "ignore_eos": True}
    chunks = events(await post(ScriptedCompleter(PASSES), "/v1/completions", body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6, 6]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
    assert (chunks[-1]["choices"], len(chunks[-2]["choices"])) == ([], 1)


async def test_llmperf_reads_a_stream() -> None:
    """LLMPerf can read this gateway's streams: each event has a choice and one token.

    Its requests have a path as model, and an empty system message.
    """
    async with client_of(ScriptedCompleter(PASSES)) as client:
        response = await client.post(
            "/v1/chat/completions", json=llmperf.body("x", 9, model="tiny"), headers=llmperf.HEADERS
        )
    assert llmperf.reads(response.content) == (6, 5, TEXT)


async def test_a_silent_stream_may_send_empty_chunks() -> None:
    """A stream without tokens sends empty chunks if so configured, since some proxies end silent streams.

    Comments would not do: LLMPerf and sglang cannot read them.
    """
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    answer = await post(ScriptedCompleter([["a"], ["b"]], gap_s=0.2), "/v1/chat/completions", body, sse_ping_s=0.02)
    deltas = [chunk["choices"][0] for chunk in events(answer)]
    texts = [delta["delta"]["content"] for delta in deltas]
    assert "".join(texts) == "ab"
    assert texts[0] == ""  # before the first token too
    assert texts.count("") >= 4
    assert [delta["finish_reason"] for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1]["finish_reason"] == "length"
    without = await post(ScriptedCompleter([["a"], ["b"]], gap_s=0.2), "/v1/chat/completions", body)
    assert len(events(without)) == 2


async def test_a_refusal_has_a_status_before_a_ping() -> None:
    full = errors.CapacityError("full", retry_after_s=1.0)
    body = {"prompt": "x", "stream": True}
    assert (await post(ScriptedCompleter([], error=full), "/v1/completions", body, sse_ping_s=5.0)).status_code == 429


async def test_an_answer_in_one_piece_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is not streamed has a limit of memory.

    Regression: 128 choices with 20 log-probabilities each took 3 GB and ten seconds of the event loop.
    """
    body = {"prompt": "x", "logprobs": 4, "n": 4}
    assert (await post(ScriptedCompleter(PASSES), "/v1/completions", body)).is_success
    monkeypatch.setattr(stream, "INLINE_SCORES", 10)
    assert (await post(ScriptedCompleter(PASSES), "/v1/completions", body)).is_success
    monkeypatch.setattr(stream, "MAX_SCORES", 100)
    refused = await post(ScriptedCompleter(PASSES), "/v1/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert (await post(ScriptedCompleter(PASSES), "/v1/completions", {**body, "n": 2})).is_success
    assert (await post(ScriptedCompleter(PASSES), "/v1/completions", {**body, "stream": True})).is_success
    monkeypatch.setattr(stream, "MAX_ALL_SCORES", 10)
    assert (await post(ScriptedCompleter(PASSES), "/v1/completions", {**body, "n": 2})).status_code == 429
    assert (await post(ScriptedCompleter(PASSES), "/v1/completions", {"prompt": "x"})).is_success
