"""State of one request at a server: its caller's limits, its deadline, its end in a drain, and its audit log line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from specdec.inference.caller import Caller, CallerLimits, request_context
from specdec.inference.commit import TextEvent
from specdec.inference.errors import CapacityError, DeadlineError, InternalError, InvalidRequestError, UnavailableError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import ANY_JSON_OBJECT, RequestDefaults
from specdec.inference.workers.calls.admitting import private_scope
from specdec.inference.workers.calls.observer import Observer
from specdec.inference.workers.calls.scope import RequestScope, SupervisedCompleter
from specdec.inference.workers.completion import CompletionRequest
from tests.support.completers import ScriptedCompleter

ALICE = Caller("alice", limits=CallerLimits(in_flight=1, max_tokens=50, logprobs=2))
BOB = Caller("bob", user="carol")
REQUEST = CompletionRequest("x", max_new_tokens=5)
ENDED = UnavailableError("ended")


def supervised(completer: ScriptedCompleter) -> SupervisedCompleter:
    return SupervisedCompleter(completer, Observer(Metrics("tiny")))


async def collected(completer: SupervisedCompleter, request: CompletionRequest = REQUEST) -> list[TextEvent]:
    return [event async for event in completer.complete(request)]


async def ask(completer: SupervisedCompleter, request: CompletionRequest, who: Caller) -> None:
    with request_context(who, "id-1"):
        await collected(completer, request)


async def test_events_pass_unchanged() -> None:
    inner = ScriptedCompleter([["a"], ["b"]])
    assert await collected(supervised(inner)) == [event async for event in inner.complete(REQUEST)]


async def test_requests_are_counted_while_they_run() -> None:
    completer = supervised(ScriptedCompleter([["a"], ["b"]]))
    async with aclosing(completer.complete(REQUEST)) as events:
        await anext(events)
        assert (completer.num_running, completer.num_waiting) == (1, 0)
    assert (completer.num_running, completer.num_waiting) == (0, 0)


async def test_a_drain_fails_what_still_runs() -> None:
    """When the grace period of a draining server is over, requests that still run fail with a clear error.

    Regression: after a gateway's grace period a stream ended in the middle of a chunk, and a whole answer was a
    bare 500.
    """
    inner = ScriptedCompleter([["a"], ["b"]], gap_s=60)
    completer = supervised(inner)
    running = asyncio.create_task(collected(completer))
    while not inner.num_running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await completer.stop(grace_s=0.01)
    with pytest.raises(UnavailableError, match="shutting down"):
        await running
    assert inner.num_running == 0
    with pytest.raises(UnavailableError, match="shutting down"):
        await collected(completer)


async def test_a_drain_ends_with_the_last_request_and_refuses_later_ones() -> None:
    completer = supervised(ScriptedCompleter([["a"], ["b"]], gap_s=0.01))
    running = asyncio.create_task(collected(completer))
    await asyncio.sleep(0)
    await asyncio.wait_for(completer.stop(grace_s=60), 60)
    assert len(await running) == 4
    with pytest.raises(UnavailableError, match="shutting down"):
        await collected(completer)


async def test_a_failure_of_this_server_leaves_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A request that fails by a fault of this server leaves one line in the log; a fault of another server leaves none.

    Regression: an error in a grammar was answered with status 500, and left no line in the log.
    """
    request = replace(REQUEST, grammar=ANY_JSON_OBJECT)
    for error in (InternalError("it broke"), InternalError("it broke", address="host:1"), InvalidRequestError("bad")):
        with pytest.raises(type(error)):
            await collected(supervised(ScriptedCompleter([["a"]], error=error)), request)
    assert caplog.messages == ["a request with a grammar (json_schema) failed: it broke"]


async def test_a_deadline_ends_the_request() -> None:
    inner = ScriptedCompleter([["a"], ["b"]], gap_s=60)
    late = replace(REQUEST, deadline=asyncio.get_running_loop().time() + 0.02)
    with pytest.raises(DeadlineError):
        await collected(supervised(inner), late)
    assert inner.num_running == 0


async def forever(num_items: int) -> AsyncGenerator[int, None]:
    """Yield `num_items` numbers, and then nothing for a minute."""
    for number in range(num_items):
        yield number
    await asyncio.sleep(60)


async def test_an_end_touches_nothing_between_two_waits() -> None:
    """A deadline that passes while no wait is running makes the next wait fail, and does not cancel the task."""
    items, scope = forever(2), RequestScope(asyncio.get_running_loop().time() + 0.02)
    for number in range(2):
        with scope:
            assert await anext(items) == number
    with pytest.raises(DeadlineError), scope:
        await anext(items)
    await asyncio.sleep(0.001)
    with pytest.raises(DeadlineError), scope:
        await anext(forever(1))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("who", ["inner", "outer", "task", "outer and task", "both scopes"])
async def test_nested_scopes_know_their_own_end(who: str) -> None:
    inner, outer = RequestScope(), RequestScope()
    seen = []

    async def within() -> AsyncGenerator[int, None]:
        try:
            with inner:
                await anext(forever(0))
        except UnavailableError:
            seen.append("inner")
            raise ValueError from None
        yield 0

    async def wait() -> None:
        try:
            with outer:
                await anext(within())
        except (UnavailableError, ValueError) as exc:
            seen.append(type(exc).__name__)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.001)
    if who in ("inner", "both scopes"):
        inner.end(ENDED)
    if who in ("outer", "outer and task", "both scopes"):
        outer.end(ENDED)
    if who in ("task", "outer and task"):
        task.cancel()
    await asyncio.wait([task])
    assert (seen, task.cancelled()) == {
        "inner": (["inner", "ValueError"], False),
        "outer": (["UnavailableError"], False),
        "task": ([], True),
        "outer and task": ([], True),
        "both scopes": (["UnavailableError"], False),
    }[who]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (CompletionRequest("x", max_new_tokens=51), "max_new_tokens 51 is above the limit of alice: 50"),
        (CompletionRequest("x", max_new_tokens=5, logprobs=3), "logprobs 3 is above the limit of alice: 2"),
        (CompletionRequest("x", max_new_tokens=5, prompt_logprobs=3), "prompt_logprobs 3 is above"),
    ],
)
async def test_a_value_above_the_limit_is_named(request_: CompletionRequest, words: str) -> None:
    completer = supervised(ScriptedCompleter([["a"]]))
    with pytest.raises(InvalidRequestError, match=words):
        await ask(completer, request_, ALICE)
    await ask(completer, request_, BOB)


@pytest.mark.parametrize(
    ("who", "default", "expected"), [(ALICE, 20, 20), (ALICE, 70, 50), (ALICE, None, 50), (BOB, 70, 70)]
)
async def test_an_open_length_stays_within_the_limit(who: Caller, default: int | None, expected: int) -> None:
    """A request without a length (max_tokens) gets a default within its caller's limit.

    Regression: a caller's limit did not apply to the default length that the operator had set for all callers.
    """
    with request_context(who, "id-1"):
        resolved = CompletionRequest("x", max_new_tokens=None).resolved(RequestDefaults(max_new_tokens=default))
    assert resolved.max_new_tokens == expected


async def test_requests_in_flight_are_counted_by_caller() -> None:
    completer, request = supervised(ScriptedCompleter([["a"]])), REQUEST
    with request_context(ALICE, "id-1"):
        async with aclosing(completer.complete(request)) as events:
            await anext(events)
            with pytest.raises(CapacityError, match="alice has 1 requests in flight, its limit is 1") as full:
                await ask(completer, request, ALICE)
            assert full.value.retry_after_s >= 0.1
            await ask(completer, request, BOB)
    await ask(completer, request, ALICE)


async def test_a_line_names_the_caller_and_never_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    observer = Observer(Metrics("tiny"))
    failing = CapacityError("full", retry_after_s=1)
    secret = ScriptedCompleter([["secret", "text"]])
    await ask(SupervisedCompleter(secret, observer), CompletionRequest("my secret"), BOB)
    with pytest.raises(CapacityError):
        await ask(SupervisedCompleter(ScriptedCompleter([], error=failing), observer), REQUEST, ALICE)
    await ask(SupervisedCompleter(ScriptedCompleter([["a"]]), observer), REQUEST, Caller())
    lines = [record.getMessage() for record in caplog.records if record.name == "specdec.audit"]
    first, second = (line.rpartition(" seconds=")[0] for line in lines)
    assert first == "request=id-1 peer=- caller=bob user=carol model=tiny tokens=2"
    assert second == "request=id-1 peer=- caller=alice user=- model=tiny tokens=0"
    assert [line.rpartition("status=")[2] for line in lines] == ["OK", "RESOURCE_EXHAUSTED"]
    assert "secret" not in caplog.text


def scope(name: str, user: str = "", peer: str = "ipv4:127.0.0.1:1") -> str:
    with request_context(Caller(name, speaks_for_others=bool(user), user=user), "1"):
        return private_scope(peer)


def test_the_worker_of_an_edge_drafts_for_all_of_its_users() -> None:
    """If a client sends requests for several users, its own draft worker drafts for the requests of all of them.

    Regression: the client "edge" sent a request for user alice, and the target looked for a draft worker of alice in
    place of the client's.
    """
    assert scope("edge", user="alice") == scope("edge", user="bob") == scope("edge")


def test_no_worker_drafts_for_another_caller_or_connection() -> None:
    assert len({scope("edge"), scope("alice"), scope("edge", peer="ipv4:127.0.0.1:2")}) == 3
