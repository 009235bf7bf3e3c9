"""The end of a grace is told to whoever still waits."""

from __future__ import annotations

import asyncio

import pytest

from inference.commit import Event
from inference.errors import UnavailableError
from inference.workers.completion import CompletionRequest
from inference.workers.draining import DrainingCompleter
from tests.support.completers import ScriptedCompleter

REQUEST = CompletionRequest("x")


async def collected(completer: DrainingCompleter) -> list[Event]:
    return [event async for event in completer.complete(REQUEST)]


async def test_what_ends_in_time_is_whole() -> None:
    inner = ScriptedCompleter([["a"], ["b"]])
    assert await collected(DrainingCompleter(inner)) == [event async for event in inner.complete(REQUEST)]


async def test_what_still_runs_fails_as_unavailable_and_is_closed() -> None:
    """The story: behind the grace of a gateway a stream was cut in mid-chunk, and an answer was a bare 500."""
    inner = ScriptedCompleter([["a"], ["b"]], gap_s=60)
    draining = DrainingCompleter(inner)
    running = asyncio.create_task(collected(draining))
    while not inner.num_running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await draining.stop(grace_s=0.01)
    with pytest.raises(UnavailableError, match="shutting down"):
        await running
    assert inner.num_running == 0
    with pytest.raises(UnavailableError, match="shutting down"):
        await collected(draining)


async def test_nobody_waits_longer_than_the_last_request() -> None:
    draining = DrainingCompleter(ScriptedCompleter([["a"], ["b"]], gap_s=0.01))
    running = asyncio.create_task(collected(draining))
    await asyncio.sleep(0)
    await asyncio.wait_for(draining.stop(grace_s=60), timeout=20)
    assert len(await running) == 4
