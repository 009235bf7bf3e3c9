"""The end of a grace is told to whoever still waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from inference.commit import Event
from inference.errors import UnavailableError
from inference.workers.completion import CompletionRequest
from inference.workers.draining import DrainingCompleter, Wait
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


async def forever(num_items: int) -> AsyncGenerator[int, None]:
    """So many items, and then none for a minute."""
    for number in range(num_items):
        yield number
    await asyncio.sleep(60)


async def test_a_wait_ends_for_all_items_at_one_time() -> None:
    """What its user awaits between two items is not touched, and the task is nobody's to cancel afterwards."""
    items = forever(2)
    with Wait(asyncio.get_running_loop().time() + 0.02) as wait:
        assert await wait.next(items) == 0
        assert await wait.next(items) == 1
        with pytest.raises(TimeoutError):
            await wait.next(items)
        await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            await wait.next(forever(1))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    with Wait() as wait:
        assert [await wait.next(ended) for ended in [forever(1)]] == [0]


@pytest.mark.parametrize("who", ["inner", "outer", "task", "outer and task", "both waits"])
async def test_a_wait_within_a_wait_tells_whose_end_it_was(who: str) -> None:
    inner, outer, told = Wait(), Wait(), []

    async def within() -> AsyncGenerator[int, None]:
        try:
            yield await inner.next(forever(0)) or 0
        except TimeoutError:
            told.append("inner")
            raise ValueError from None

    async def wait() -> None:
        try:
            await outer.next(within())
        except (TimeoutError, ValueError) as exc:
            told.append(type(exc).__name__)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.001)
    if who in ("inner", "both waits"):
        inner.end()
    if who in ("outer", "outer and task", "both waits"):
        outer.end()
    if who in ("task", "outer and task"):
        task.cancel()
    await asyncio.wait([task])
    assert (told, task.cancelled()) == {
        "inner": (["inner", "ValueError"], False),
        "outer": (["TimeoutError"], False),
        "task": ([], True),
        "outer and task": ([], True),
        "both waits": (["TimeoutError"], False),
    }[who]
