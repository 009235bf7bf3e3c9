"""What one caller may ask for at most, and the line that is written of it."""

from __future__ import annotations

import logging
from contextlib import aclosing

import pytest

from inference.caller import Caller, Limits, serving
from inference.errors import CapacityError, InvalidRequestError
from inference.observe.metrics import Metrics
from inference.request import RequestDefaults
from inference.workers.completion import CompletionRequest
from inference.workers.limited import LimitedCompleter
from inference.workers.observed import ObservedCompleter, Observer
from tests.support.completers import ScriptedCompleter

ALICE = Caller("alice", limits=Limits(in_flight=1, max_tokens=50, logprobs=2))
BOB = Caller("bob", user="carol")


async def ask(completer: LimitedCompleter | ObservedCompleter, request: CompletionRequest, who: Caller) -> None:
    with serving(who, "id-1"):
        async for _ in completer.complete(request):
            pass


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (CompletionRequest("x", max_new_tokens=51), "max_new_tokens 51 is above the limit of alice: 50"),
        (CompletionRequest("x", max_new_tokens=5, logprobs=3), "logprobs 3 is above the limit of alice: 2"),
        (CompletionRequest("x", max_new_tokens=5, prompt_logprobs=3), "prompt_logprobs 3 is above"),
    ],
)
async def test_a_value_above_the_limit_is_named(request_: CompletionRequest, words: str) -> None:
    completer = LimitedCompleter(ScriptedCompleter([["a"]]))
    with pytest.raises(InvalidRequestError, match=words):
        await ask(completer, request_, ALICE)
    await ask(completer, request_, BOB)


@pytest.mark.parametrize(
    ("who", "default", "expected"), [(ALICE, 20, 20), (ALICE, 70, 50), (ALICE, None, 50), (BOB, 70, 70)]
)
async def test_what_is_left_open_is_within_the_limit(who: Caller, default: int | None, expected: int) -> None:
    """The story: a key with a limit never heard of the length that the server's operator had set for all."""
    with serving(who, "id-1"):
        resolved = CompletionRequest("x", max_new_tokens=None).resolved(RequestDefaults(max_new_tokens=default))
    assert resolved.max_new_tokens == expected


async def test_requests_in_flight_are_counted_by_caller() -> None:
    completer, request = LimitedCompleter(ScriptedCompleter([["a"]])), CompletionRequest("x", max_new_tokens=5)
    with serving(ALICE, "id-1"):
        async with aclosing(completer.complete(request)) as events:
            await anext(events)
            with pytest.raises(CapacityError, match="alice has 1 requests in flight, its limit is 1") as full:
                await ask(completer, request, ALICE)
            assert full.value.retry_after_s >= 0.1
            await ask(completer, request, BOB)
    await ask(completer, request, ALICE)


async def test_a_line_says_who_asked_and_never_what(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    observer = Observer(Metrics("tiny"))
    failing = CapacityError("full", retry_after_s=1)
    await ask(ObservedCompleter(ScriptedCompleter([["secret", "text"]]), observer), CompletionRequest("my secret"), BOB)
    with pytest.raises(CapacityError):
        await ask(ObservedCompleter(ScriptedCompleter([], error=failing), observer), CompletionRequest("x"), ALICE)
    await ask(ObservedCompleter(ScriptedCompleter([["a"]]), observer), CompletionRequest("x"), Caller())
    lines = [record.getMessage() for record in caplog.records if record.name == "specdec.audit"]
    first, second = (line.rpartition(" seconds=")[0] for line in lines)
    assert first == "request=id-1 caller=bob user=carol model=tiny tokens=2"
    assert second == "request=id-1 caller=alice user=- model=tiny tokens=0"
    assert [line.rpartition("status=")[2] for line in lines] == ["OK", "RESOURCE_EXHAUSTED"]
    assert "secret" not in caplog.text
