"""Many prompts at once: results keep their order, a failure affects one prompt, and a full server is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from specdec.inference.cli.prompts.output import TextSink
from specdec.inference.cli.prompts.source import PromptJob
from specdec.inference.cli.prompts.topologies import run_prompts
from specdec.inference.commit import Delta, Finished, FinishReason, OwnDrafts, Started, TextEvent
from specdec.inference.config import ObserveConfig
from specdec.inference.errors import CapacityError, UnavailableError
from specdec.inference.request import SamplingParams
from specdec.inference.workers.completing.results import Result
from specdec.inference.workers.completion import CompletionRequest

TEMPLATE = CompletionRequest(prompt="", max_new_tokens=2)


def job(prompts: list[str], *, concurrency: int) -> PromptJob:
    return PromptJob(tuple(prompts), TEMPLATE, concurrency, format="text", observe=ObserveConfig("draft"))


class ListSink:
    """Output sink that records every call as a line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, result: Result) -> None:
        self.lines.append(f"begin {result.prompt}")

    def show(self, result: Result, delta: Delta) -> None:
        self.lines.append(f"{result.prompt} {delta.text}")

    def end(self, result: Result) -> None:
        self.lines.append(f"end {result.prompt}")


@pytest.mark.parametrize(("temperature", "source"), [(0.0, "lookup"), (1.0, "draft")])
def test_the_line_of_figures_is_explained(temperature: float, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line of figures after an answer leaves out figures that do not apply to the answer.

    Regression: the line had a seed at temperature 0. It called the acceptance a draft's where the target had proposed
    the tokens itself, by lookup in the text.
    """
    result = Result("x")
    own = OwnDrafts(2, 1) if source == "lookup" else OwnDrafts()
    result.record(Started(1, 9898))
    result.record(Delta(1, (5, 6), 2, 1, own=own, text="ab"))
    result.record(Finished(FinishReason.STOP))
    TextSink(SamplingParams(temperature=temperature)).end(result)
    line = capsys.readouterr().out
    assert ("seed 9898" in line) == (temperature > 0)
    assert ("acceptance 0.50 of what was looked up" in line) == (source == "lookup")
    assert "acceptance 0.50" in line


class ScriptedCompleter:
    """Completer that answers prompt "slow" late, fails "broken" after a token, and is full at the first "patient"."""

    def __init__(self) -> None:
        self.num_running = 0
        self.max_running = 0
        self.num_attempts = 0

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            async for event in self._events(str(request.prompt)):
                yield event
        finally:
            self.num_running -= 1

    async def _events(self, prompt: str) -> AsyncGenerator[TextEvent, None]:
        if prompt == "patient":
            self.num_attempts += 1
            if self.num_attempts == 1:
                raise CapacityError("full", retry_after_s=0.01)
        yield Started(num_prompt_tokens=len(prompt), seed=7)
        await asyncio.sleep(0.05 if prompt == "slow" else 0)
        yield _delta(1, "a")
        if prompt == "broken":
            raise UnavailableError("gone")
        yield _delta(2, "b")
        yield Finished(FinishReason.LENGTH)


def _delta(token_id: int, text: str) -> Delta:
    return Delta(0, (token_id,), num_draft_tokens=2, text=text)


async def test_results_are_shown_in_the_order_of_the_prompts() -> None:
    sink, completer = ListSink(), ScriptedCompleter()
    results = await run_prompts(completer, job(["slow", "quick"], concurrency=2), sink)
    assert sink.lines == [
        "begin slow",
        "slow a",
        "slow b",
        "end slow",
        "begin quick",
        "quick a",
        "quick b",
        "end quick",
    ]
    assert [result.text for result in results] == ["ab", "ab"]
    assert completer.max_running == 2


async def test_no_more_at_once_than_asked() -> None:
    completer = ScriptedCompleter()
    await run_prompts(completer, job(["slow"] * 5, concurrency=2), ListSink())
    assert completer.max_running == 2


async def test_a_failed_prompt_does_not_stop_others() -> None:
    broken, fine = await run_prompts(ScriptedCompleter(), job(["broken", "fine"], concurrency=2), ListSink())
    fields = broken.to_json()
    assert (fields["text"], fields["token_ids"], fields["finish_reason"]) == ("a", [1], None)
    assert fields["error"] == {"code": "UNAVAILABLE", "message": "gone"}
    assert (fine.text, fine.error) == ("ab", None)
    assert "error" not in fine.to_json()


async def test_a_full_server_is_asked_again() -> None:
    completer = ScriptedCompleter()
    (result,) = await run_prompts(completer, job(["patient"], concurrency=1), ListSink())
    assert (result.text, completer.num_attempts) == ("ab", 2)


async def test_a_full_server_is_not_asked_for_ever() -> None:
    """The deadline of a prompt covers all attempts together, if a full server refuses the prompt.

    Regression: each attempt had a deadline of its own, so at a server that stayed full the command never
    ended.
    """
    patient = replace(job(["patient"], concurrency=1), deadline_s=0.001)
    (result,) = await run_prompts(ScriptedCompleter(), patient, ListSink())
    assert isinstance(result.error, CapacityError)


async def test_json_of_a_result_has_the_documented_fields() -> None:
    (result,) = await run_prompts(ScriptedCompleter(), job(["p"], concurrency=1), ListSink())
    fields = result.to_json()
    assert fields["prompt"] == "p"
    assert (fields["token_ids"], fields["text"], fields["finish_reason"]) == ([1, 2], "ab", "length")
    assert (fields["seed"], fields["num_prompt_tokens"], fields["acceptance_rate"]) == (7, 1, 0.0)
    assert set(fields["timings"]) == {"ttft_s", "tpot_s", "end_to_end_s"}
