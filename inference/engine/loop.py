"""The loop every model server turns: admit, step, deliver.

One asyncio task owns all sessions; only it changes them. Each round it gives free slots to waiting sessions, which
begin with what earlier ones have left there, asks the subclass for the work of one step, runs that on the model thread,
and hands the results out. What a step is, and when a session has work, is the subclass's affair: a target verifies
(target.py), a draft model extends chains (draft.py).

A step that fails costs nobody a token, since tokens are a function of what is committed: its sessions are under
suspicion, and each takes its next step alone, from its committed tokens. Who fails alone ends; the others saw a pause.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from inference.engine.admission import Admission, Holder
from inference.engine.model_thread import ModelThread
from inference.engine.prefixes import Place
from inference.errors import InternalError, UnavailableError
from inference.model.decoder import Decoder
from inference.model.proposer import Proposer
from inference.model.slots import PrefixKeeper
from inference.observe.timeline import Timeline

logger = logging.getLogger(__name__)


class EngineSession(Holder, Protocol):
    """A session as the loop sees it."""

    def replay(self) -> None:
        """Forget what a failed step may have left half done: begin again from the committed tokens, under suspicion."""

    @property
    def is_suspect(self) -> bool:
        """Whether it has not come further since `replay`."""


PASS_TIMEOUT_S = 60.0
"""A step that takes longer is one that may never end: the server is not ready meanwhile."""
MAX_FAILED_STEPS = 8
"""So many in a row, of whomever, and the engine is broken."""
SHRUNK_STEPS = 100
"""Steps for which fewer sessions go together, after memory was short for more."""
LAST_STEP_S = 1.0
"""What a step gets whose sessions have all left, to end behind them."""
SHUTTING_DOWN = "the server is shutting down"

SessionT = TypeVar("SessionT", bound=EngineSession)
WorkT = TypeVar("WorkT")
ResultT = TypeVar("ResultT")
T = TypeVar("T")


class Engine(abc.ABC, Generic[SessionT, WorkT, ResultT]):
    """Sessions, slots of a model, and the loop. Start it inside a running event loop; use it from that loop alone."""

    def __init__(
        self,
        model: Decoder | Proposer,
        *,
        max_waiting: int,
        prefix_caching: bool = True,
        pass_timeout_s: float = PASS_TIMEOUT_S,
    ) -> None:
        self._keeper = model if isinstance(model, PrefixKeeper) else None
        slots = self._keeper.slots if self._keeper is not None and prefix_caching else None
        self._admission: Admission[SessionT] = Admission(
            num_slots=model.num_slots, max_waiting=max_waiting, model=slots
        )
        self.num_slots = model.num_slots
        self._thread = ModelThread()
        self._wake = asyncio.Event()
        self._left = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._refusal = ""  # why no session may enter, if none may
        self.broken: str | None = None
        """Why no request can be served any more; only a restart helps."""
        self._pass_timeout_s = pass_timeout_s
        self._step_began: float | None = None
        self._num_failed_steps = 0
        self._suspects: deque[SessionT] = deque()
        self._num_together: int | None = None  # sessions of a step at most, while memory is short for more
        self._shrunk_until = self._num_steps = 0
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

    def _can_replay(self, session: SessionT) -> bool:
        """Whether a session's tokens can be computed again."""
        return True

    _step_name = "step"

    def _describe(self, work: list[WorkT], results: list[ResultT]) -> dict[str, Any]:
        """What a time-line shows of a step."""
        return {"sessions": len(work)}

    @property
    def num_running(self) -> int:
        return len(self._admission.running)

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    @property
    def hangs(self) -> bool:
        """Whether a step has run for so long that it may never end."""
        return self._step_began is not None and time.monotonic() - self._step_began > self._pass_timeout_s

    @property
    def fault(self) -> str | None:
        """Why nothing is served at the moment, in words; None: all is well."""
        if self.broken is None and self.hangs:
            return f"a {self._step_name} has run for longer than {self._pass_timeout_s:g} s"
        return self.broken

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run(), name=type(self).__name__)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Refuse new sessions, let the present ones finish for `grace_s` seconds, fail the rest, end the loop."""
        self._refusal = self._refusal or SHUTTING_DOWN
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._all_left()
        for session in self._sessions():
            session.fail(UnavailableError(SHUTTING_DOWN))
            self.close(session)
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_STEP_S):
                while self._thread.is_busy:  # noqa: ASYNC110 - a thread, of which nobody waits for anything any more
                    await asyncio.sleep(0.01)
        if self._thread.is_busy:  # the interpreter would wait for it at its end
            self.broken = self.broken or f"a {self._step_name} was still running when the server stopped"
        self._thread.close()

    async def _all_left(self) -> None:
        while self._sessions():
            self._left.clear()
            await self._left.wait()

    def _sessions(self) -> list[SessionT]:
        return [*self._admission.running, *self._admission.waiting]

    def _enter(self, session: SessionT) -> None:
        if self._refusal:
            raise UnavailableError(self._refusal)
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
            logger.exception("the engine broke")
            self._break("the engine broke; the server's log has the cause")

    def _break(self, why: str) -> None:
        """Take no more requests: whoever watches restarts the server."""
        logger.error("no more requests are taken: %s", why)
        self.broken = self._refusal = why
        for session in self._sessions():
            self._end(session, UnavailableError(why))

    async def _turn(self) -> None:
        while self.broken is None:
            self._wake.clear()
            if entered := self._admission.admit():
                await self._begin(entered)
            scheduled = self._next()
            if scheduled:
                await self._step(scheduled)
            else:
                await self._wake.wait()

    async def _begin(self, entered: Sequence[tuple[SessionT, Place]]) -> None:
        """Let the model know of new sessions, and of what their slots hold for them already."""
        if self._keeper is None:
            return
        begin = self._keeper.begin
        places = [(p.slot, p.source_slot, session.wanted.token_ids[: p.num_tokens]) for session, p in entered]
        try:
            await self._run_model(lambda: [begin(*place) for place in places])
        except Exception as exc:
            self._step_failed({session: place.slot for session, place in entered}, exc)

    def _next(self) -> list[tuple[SessionT, WorkT]]:
        """The work of the next step: of one suspect alone, while there are any."""
        while self._suspects:
            suspect = self._suspects[0]
            if suspect.slot is not None and suspect.is_suspect and (work := self._schedule((suspect,))):
                return work
            self._suspects.popleft()
        return self._together(self._schedule(tuple(self._admission.running)))

    def _together(self, scheduled: list[tuple[SessionT, WorkT]]) -> list[tuple[SessionT, WorkT]]:
        """As many as may share a step, by turns."""
        self._num_steps += 1
        if self._num_steps > self._shrunk_until:
            self._num_together = None
        if self._num_together is None or len(scheduled) <= self._num_together:
            return scheduled
        first = self._num_steps * self._num_together % len(scheduled)
        return [*scheduled[first:], *scheduled[:first]][: self._num_together]

    async def _step(self, scheduled: list[tuple[SessionT, WorkT]]) -> None:
        work = [work for _, work in scheduled]
        slots = {session: session.slot for session, _ in scheduled}
        started = time.monotonic()
        try:
            results = await self._run_model(lambda: self._compute(work))
        except Exception as exc:
            self._step_failed(slots, exc)
            return
        self._num_failed_steps = 0
        if self.timeline is not None:
            self.timeline.span(self._step_name, started, time.monotonic(), **self._describe(work, results))
        for (session, piece), result in zip(scheduled, results, strict=True):
            if session.slot == slots[session]:  # else it was closed meanwhile
                self._deliver(session, piece, result)

    async def _run_model(self, work: Callable[[], T]) -> T:
        """Run on the model thread; how long it takes is watched."""
        self._step_began = time.monotonic()
        try:
            return await self._thread.run(work)
        finally:
            self._step_began = None

    def _step_failed(self, slots: Mapping[SessionT, int | None], exc: Exception) -> None:
        """Find out whose fault it was: try each session alone. `slots` says which one it had in the step."""
        logger.error("a step over %d sessions failed", len(slots), exc_info=exc)
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            self._break(f"{MAX_FAILED_STEPS} steps in a row failed")
            return
        if _is_short_of_memory(exc):
            self._num_together = max(1, len(slots) // 2)
            self._shrunk_until = self._num_steps + SHRUNK_STEPS
        tried = len(slots) == 1 and all(session.is_suspect for session in slots)
        for session, slot in slots.items():
            if session.slot is None:  # closed meanwhile
                self._admission.forget(slot)
                continue
            session.replay()
            if tried or not self._can_replay(session):
                self._end(session, _failure(exc, tried=tried))
            else:
                self._suspects.append(session)

    def _end(self, session: SessionT, error: Exception) -> None:
        session.fail(error)
        self.close(session)


def _failure(exc: Exception, *, tried: bool) -> Exception:
    """What a session is told that a failed step ends."""
    if isinstance(exc, InternalError):
        return exc
    if tried:
        return InternalError("the model failed on this request; the server's log has the cause")
    return InternalError("the model failed, and what it samples on the device cannot be computed again; ask anew")


def _is_short_of_memory(exc: Exception) -> bool:
    """MemoryError, or a device's own, whose class no engine imports."""
    return isinstance(exc, MemoryError) or "OutOfMemory" in type(exc).__name__
