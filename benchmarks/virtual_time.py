"""Clock of its own for engines, so that a figure is the same on any machine, busy or idle.

Event loop and engines run as they are. The loop's clock jumps to the next event, and a model's pass runs at once and
takes the time for which it sleeps (`inference.backends.registry.asleep`). What the host computes takes no time.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from inference.engine.guard import ModelThread

T = TypeVar("T")
_TICK_S = 1e-6
"""Shortest jump, so that a wait too short to change the clock's last digit ends."""


class Clock:
    """Clock in seconds: the loop's time, and the time that the running function has slept since."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._slept_s = 0.0

    def monotonic(self) -> float:
        return self.now_s + self._slept_s

    def sleep(self, seconds: float) -> None:
        self._slept_s += seconds

    async def run(self, _: ModelThread, function: Callable[[], T]) -> T:
        """Run a function of a model's thread now; its result is there when its time has passed."""
        result = function()
        seconds, self._slept_s = self._slept_s, 0.0
        await asyncio.sleep(seconds)
        return result


class _Selector(selectors.SelectSelector):
    """Selector that jumps to the loop's next event instead of waiting for it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("every task waits for another one")
            self._clock.now_s += max(_TICK_S, timeout) if timeout else 0.0
        return ready


@contextmanager
def _virtual_time(clock: Clock) -> Iterator[None]:
    """Let `time` and the models' threads follow a clock inside the block."""

    async def run(thread: ModelThread, function: Callable[[], T]) -> T:
        return await clock.run(thread, function)

    with (
        patch.object(time, "monotonic", clock.monotonic),
        patch.object(time, "sleep", clock.sleep),
        patch.object(ModelThread, "run", run),
    ):
        yield


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop with a clock of its own, as `asyncio.run` does on a real one."""
    clock = Clock()
    with (
        _virtual_time(clock),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Selector(clock))) as runner,
    ):
        return runner.run(main)
