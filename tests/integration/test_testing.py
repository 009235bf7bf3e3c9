"""Tests of `specdec.testing`, which lets another program's tests run against a server with scripted answers."""

from __future__ import annotations

import pytest
from openai import OpenAI

import specdec
from specdec.testing import ScriptedCompleter, serving

pytestmark = pytest.mark.slow


def test_the_bundled_pair_answers_both_apis() -> None:
    with serving() as server, specdec.Client(server.address) as client, specdec.LLM() as llm:
        (result,) = client.generate("1, 2, 3,", max_new_tokens=6)
        assert result.text == llm.generate("1, 2, 3,", max_new_tokens=6)[0].text
        openai = OpenAI(base_url=server.url, api_key="none")
        model = openai.models.list().data[0].id
        answer = openai.completions.create(model=model, prompt="1, 2, 3,", max_tokens=6, temperature=0)
        assert answer.choices[0].text == result.text


def test_a_scripted_answer_needs_no_model() -> None:
    """A server answers with a text that the test sets, without a model, and records the requests for the test."""
    script = ScriptedCompleter([["Hello", ","], [" you", "."]])
    with serving(script) as server:
        openai = OpenAI(base_url=server.url, api_key="none")
        messages = [{"role": "user", "content": "Hi"}]
        answer = openai.chat.completions.create(model="tiny", messages=messages, seed=5)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "Hello, you."
        with specdec.Client(server.address) as client:
            assert client.generate("x", max_new_tokens=4)[0].text == "Hello, you."
    assert [request.seed for request in script.requests] == [5, None]


def test_a_scripted_failure_reaches_the_program() -> None:
    script = ScriptedCompleter([], error=specdec.errors.CapacityError("full", retry_after_s=1.0))
    with serving(script) as server:
        openai = OpenAI(base_url=server.url, api_key="none", max_retries=0)
        with pytest.raises(Exception, match="full") as caught:
            openai.completions.create(model="tiny", prompt="x")
        assert getattr(caught.value, "status_code", None) == 429
