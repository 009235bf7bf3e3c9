"""The only door from the event loop to a model: one thread that runs forward passes, one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class ModelThread:
    """Runs functions on one thread of its own. A running pass cannot be interrupted; its result can be dropped."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self.is_busy = False

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, function)

    def _run(self, function: Callable[[], T]) -> T:
        self.is_busy = True
        try:
            return function()
        finally:
            self.is_busy = False

    def close(self) -> None:
        """End the thread after the running pass, which may never end: nobody waits for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
