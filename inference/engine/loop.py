"""The loop every model server turns: admit, step, deliver.

One asyncio task owns all sessions; only it changes them. Each round it gives free slots to waiting sessions, asks the
subclass for the work of one step, runs that on the model thread, and hands the results out. What a step is, and when a
session has work, is the subclass's affair: a target verifies (target.py), a draft model extends chains (drafting.py).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from inference.engine.admission import Admission, Holder
from inference.engine.model_thread import ModelThread
from inference.errors import InternalError, UnavailableError
from inference.observe.timeline import Timeline

logger = logging.getLogger(__name__)


class EngineSession(Holder, Protocol):
    """A session as the loop sees it."""

    def fail(self, error: Exception) -> None:
        """End the session with an error."""


SessionT = TypeVar("SessionT", bound=EngineSession)
WorkT = TypeVar("WorkT")
ResultT = TypeVar("ResultT")


class Engine(abc.ABC, Generic[SessionT, WorkT, ResultT]):
    """Sessions, slots, and the loop. Start it inside a running event loop; use it from that loop alone."""

    def __init__(self, *, num_slots: int, max_waiting: int) -> None:
        self._admission: Admission[SessionT] = Admission(num_slots=num_slots, max_waiting=max_waiting)
        self._thread = ModelThread()
        self._wake = asyncio.Event()
        self._left = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._draining = False
        self.timeline: Timeline | None = None

    @abc.abstractmethod
    def _schedule(self, sessions: Sequence[SessionT]) -> list[tuple[SessionT, WorkT]]:
        """The work of the next step; empty if no session has any."""

    @abc.abstractmethod
    def _compute(self, work: list[WorkT]) -> list[ResultT]:
        """One step, on the model thread: one result per piece of work."""

    @abc.abstractmethod
    def _deliver(self, session: SessionT, work: WorkT, result: ResultT) -> None:
        """Apply one result to a session that still holds its slot."""

    _step_name = "step"

    def _describe(self, work: list[WorkT], results: list[ResultT]) -> dict[str, Any]:
        """What a time-line shows of a step."""
        return {"sessions": len(work)}

    @property
    def num_slots(self) -> int:
        return self._admission.num_slots

    @property
    def num_running(self) -> int:
        return len(self._admission.running)

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run(), name=type(self).__name__)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Refuse new sessions, let the present ones finish for `grace_s` seconds, fail the rest, end the loop."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._all_left()
        for session in self._sessions():
            session.fail(UnavailableError("the server is shutting down"))
            self.close(session)
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._thread.close()

    async def _all_left(self) -> None:
        while self._sessions():
            self._left.clear()
            await self._left.wait()

    def _sessions(self) -> list[SessionT]:
        return [*self._admission.running, *self._admission.waiting]

    def _enter(self, session: SessionT) -> None:
        if self._draining:
            raise UnavailableError("the server is shutting down")
        self._admission.enqueue(session)
        self.wake()

    def close(self, session: SessionT) -> None:
        """Free the session's slot, or its place in the queue; its running pass, if any, is dropped."""
        self._admission.release(session)
        self._left.set()
        self.wake()

    def wake(self) -> None:
        """Look for work again: something has changed."""
        self._wake.set()

    async def _run(self) -> None:
        try:
            await self._turn()
        except Exception:
            logger.exception("the engine broke; it takes no more requests")
            self._draining = True
            self._fail(self._sessions())

    async def _turn(self) -> None:
        while True:
            self._wake.clear()
            self._admission.admit()
            scheduled = self._schedule(tuple(self._admission.running))
            if scheduled:
                await self._step(scheduled)
            else:
                await self._wake.wait()

    async def _step(self, scheduled: list[tuple[SessionT, WorkT]]) -> None:
        work = [work for _, work in scheduled]
        slots = [session.slot for session, _ in scheduled]
        started = time.monotonic()
        try:
            results = await self._thread.run(lambda: self._compute(work))
        except Exception:
            logger.exception("a step over %d sessions failed; they end, the server goes on", len(scheduled))
            self._fail([session for session, _ in scheduled])
            return
        if self.timeline is not None:
            self.timeline.span(self._step_name, started, time.monotonic(), **self._describe(work, results))
        for (session, piece), slot, result in zip(scheduled, slots, results, strict=True):
            if session.slot == slot:  # else it was closed meanwhile
                self._deliver(session, piece, result)

    def _fail(self, sessions: Sequence[SessionT]) -> None:
        for session in sessions:
            session.fail(InternalError("the model failed on this request; the server's log has the cause"))
            self.close(session)
