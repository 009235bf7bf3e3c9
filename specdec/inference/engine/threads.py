"""Threads for work on a request before it gets a slot, such as tokenizing; the clients' accounts take turns on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from specdec.inference.engine.admission import Admission
from specdec.inference.engine.prefixes import Prefix

_Out = TypeVar("_Out")


class _Job:
    """Job that waits for a thread or runs on one; `Admission`, which queues it, takes the threads for slots.

    A running job does not yield its thread, since a thread cannot be stopped.

    Attributes:
        slot: number of the job's thread; None while it waits.
        turn: future that is done once the job has a thread.
    """

    can_yield = False
    wanted = held = Prefix((), 0)

    def __init__(self) -> None:
        self.slot: int | None = None
        self.turn = asyncio.get_running_loop().create_future()

    def enter(self, slot: int, num_cached_tokens: int) -> None:
        self.slot = slot
        if not self.turn.done():  # its request may have been cancelled just now
            self.turn.set_result(None)

    def leave(self) -> None:
        self.slot = None

    def fail(self, error: Exception) -> None:
        if not self.turn.done():
            self.turn.set_exception(error)


class Threads:
    """Threads beside the event loop; jobs queue for them by the rules of `Admission`.

    All calls come from one event loop, except of `is_awaited`.

    Args:
        work: name of the work, for the threads' names and for errors.
        num_threads: number of threads.
        num_places: most jobs that run or wait.
    """

    def __init__(self, work: str, *, num_threads: int, num_places: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=work)
        self._admission = Admission[_Job](
            num_slots=num_threads, max_waiting=num_places - num_threads, what=f"threads for {work}"
        )

    def is_awaited(self) -> bool:
        """Return whether a job waits whose client account has no running job; any thread may call this."""
        return self._admission.is_awaited

    async def run(self, work: Callable[..., _Out], *arguments: object) -> _Out:
        """Run `work` on a thread, and return its result; if the caller is cancelled meanwhile, the work still goes on.

        Raises:
            CapacityError: too many jobs wait already, or this one was removed from the queue for another account's job.
        """
        job = _Job()
        self._admission.enqueue(job)
        self._admission.admit()
        with ExitStack() as unless_begun:
            unless_begun.callback(self._leave, job)
            await job.turn
            running = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
            unless_begun.pop_all()
            running.add_done_callback(partial(self._leave, job))
        await asyncio.wait([running])  # which, cancelled, does not cancel the future
        return running.result()

    def _leave(self, job: _Job, done: asyncio.Future[Any] | None = None) -> None:
        if done is not None:
            done.exception()  # read here, since the request that waited for it may have ended
        self._admission.release(job)
        self._admission.admit()
