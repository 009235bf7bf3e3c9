"""Loop of every engine: admit waiting sessions, run one step of the model, deliver its results.

One asyncio task owns all sessions; only it changes them. In each round it gives free slots to waiting sessions, gets
the work of one step from the subclass, runs it on the model thread, and delivers the results. A target's step verifies
draft tokens (target.py), a draft model's step makes them (draft.py). guard.py handles failed steps.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from specdec.inference.engine.admission import Admission
from specdec.inference.engine.guard import MAX_FAILED_STEPS, ModelThread, SessionT, StepGuard, WorkT
from specdec.inference.errors import UnavailableError
from specdec.inference.model.decoder import Decoder
from specdec.inference.model.proposer import Proposer
from specdec.inference.model.slots import PrefixKeeper
from specdec.inference.observe.timeline import Timeline

logger = logging.getLogger(__name__)

PASS_TIMEOUT_S = 60.0
"""Seconds after which a running step is assumed never to end; the server then reports that it is not ready."""
LAST_STEP_S = 1.0
"""Seconds that a shutdown waits for the running step, after all sessions have left."""
SHUTTING_DOWN = "the server is shutting down"

ResultT = TypeVar("ResultT")


class Engine(abc.ABC, Generic[SessionT, WorkT, ResultT]):
    """Engine of one model: its sessions, its slots and the loop. All calls come from one running event loop.

    Args:
        model: the model.
        max_waiting: most sessions that may wait for a slot.
        prefix_caching: True if a session may reuse a prefix that an earlier one left in a slot.
        pass_timeout_s: seconds after which a running step is assumed never to end.
        num_spare: number of the model's slots that only keep cached prefixes of sessions that left; all the others may
            be in use at a time. See `Admission`.

    Attributes:
        num_slots: most sessions that have a slot at a time.
        broken: reason why no request can be served any more; None while requests are served. Only a restart helps.
        timeline: recorder of the steps; None records nothing.
    """

    def __init__(
        self,
        model: Decoder | Proposer,
        *,
        max_waiting: int,
        prefix_caching: bool = True,
        pass_timeout_s: float = PASS_TIMEOUT_S,
        num_spare: int = 0,
    ) -> None:
        self._keeper = model if isinstance(model, PrefixKeeper) else None
        slots = self._keeper.slots if self._keeper is not None and prefix_caching else None
        self.num_slots = model.num_slots - num_spare
        self._admission = Admission[SessionT](
            num_slots=self.num_slots, max_waiting=max_waiting, model=slots, num_spare=num_spare
        )
        self._thread = ModelThread()
        self._wake = asyncio.Event()
        self._left = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._refusal = ""  # the reason why no session may enter; empty if they may
        self.broken: str | None = None
        self._pass_timeout_s = pass_timeout_s
        self._guard = StepGuard(self._schedule, self._can_replay)
        self.timeline: Timeline | None = None

    @abc.abstractmethod
    def _schedule(self, sessions: Sequence[SessionT]) -> list[tuple[SessionT, WorkT]]:
        """Return the sessions that take part in the next step, each with its work; empty if no session has any."""

    @abc.abstractmethod
    def _compute(self, work: list[WorkT]) -> list[ResultT]:
        """Run one step, on the model thread; return one result per piece of work."""

    @abc.abstractmethod
    def _deliver(self, session: SessionT, work: WorkT, result: ResultT) -> None:
        """Apply one result to a session that still holds its slot."""

    def _passed(self, done: Sequence[tuple[SessionT, WorkT, ResultT]]) -> None:
        """Take note of a step after its results were delivered; does nothing unless a subclass overrides it.

        Args:
            done: (session, its work, its result) for each session of the step; empty if the step failed.
        """

    def _rest(self) -> None:
        """Take note that no session has work; does nothing unless a subclass overrides it."""

    def _can_replay(self, session: SessionT) -> bool:
        """Return whether a session gets the same tokens if it is computed again after a failed step."""
        return True

    _step_name = "step"

    def _describe(self, work: list[WorkT], results: list[ResultT]) -> dict[str, Any]:
        """Return, by name, the figures that the recorded time-line shows of a step besides its name and its time."""
        return {"sessions": len(work)}

    @property
    def num_running(self) -> int:
        return len(self._admission.running)

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    @property
    def hangs(self) -> bool:
        """Return whether a step has run for so long that it may never end."""
        began = self._thread.began
        return began is not None and time.monotonic() - began > self._pass_timeout_s

    @property
    def fault(self) -> str | None:
        """Return why the engine serves no requests at present; None if it serves them."""
        if self.broken is None and self.hangs:
            return f"a {self._step_name} has run for longer than {self._pass_timeout_s:g} s"
        return self.broken

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run(), name=type(self).__name__)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Refuse new sessions, let the present ones run for `grace_s` seconds, end the rest, and end the loop."""
        self._refusal = self._refusal or SHUTTING_DOWN
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._sessions():
                    self._left.clear()
                    await self._left.wait()
        for session in self._sessions():
            session.fail(UnavailableError(SHUTTING_DOWN))
            self.close(session)
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_STEP_S):
                while self._thread.began is not None:  # noqa: ASYNC110 - a thread sets no asyncio.Event
                    await asyncio.sleep(0.01)
        if self._thread.began is not None:  # the interpreter would wait for the thread when it ends
            self.broken = self.broken or f"a {self._step_name} was still running when the server stopped"
        self._thread.close()

    def _sessions(self) -> list[SessionT]:
        return [*self._admission.running, *self._admission.waiting]

    def _enter(self, session: SessionT) -> None:
        if self._refusal:
            raise UnavailableError(self._refusal)
        self._admission.enqueue(session)
        self.wake()

    def close(self, session: SessionT) -> None:
        """Free the session's slot, or remove it from the queue; what a running step computes for it is dropped."""
        self._admission.release(session)
        self._left.set()
        self.wake()

    async def until_step_ends(self) -> None:
        """Wait until the step that runs now has ended."""
        await self._thread.run(lambda: None)  # the thread runs one function after another

    def wake(self) -> None:
        """Let the loop look for work again, if it waits because no session had any."""
        self._wake.set()

    async def _run(self) -> None:
        try:
            await self._turn()
        except Exception:
            logger.exception("the engine broke")
            self._break("the engine broke; the server's log has the cause")

    def _break(self, why: str) -> None:
        """Refuse requests from now on, and end the present ones with an error; since `broken` is set, the server exits.

        `why` is the reason, which clients and the log get as text.
        """
        logger.error("no more requests are taken: %s", why)
        self.broken = self._refusal = why
        for session in self._sessions():
            self._end(session, UnavailableError(why))

    async def _turn(self) -> None:
        """Admit waiting sessions, run steps and deliver their results, until the engine is broken."""
        while self.broken is None:
            self._wake.clear()
            await self._admit()
            if scheduled := self._guard.next_step(tuple(self._admission.running)):
                for session, work, result in (done := await self._step(scheduled)):
                    if session.slot is not None:  # else it was closed meanwhile
                        self._deliver(session, work, result)
                self._passed(done)
            else:
                self._rest()
                await self._wake.wait()

    async def _admit(self) -> None:
        """Give free slots to waiting sessions, and let the model prepare each slot with the prefix that is reused."""
        entered = self._admission.admit()
        if self._keeper is None or not entered:
            return
        begin = self._keeper.begin
        places = [(p.slot, p.source_slot, session.wanted.token_ids[: p.num_tokens]) for session, p in entered]
        try:
            await self._thread.run(lambda: [begin(*place) for place in places])
        except Exception as exc:
            self._take_failure({session: place.slot for session, place in entered}, exc)

    async def _step(self, scheduled: Sequence[tuple[SessionT, WorkT]]) -> list[tuple[SessionT, WorkT, ResultT]]:
        """Run one step on the model thread for sessions, each with its work.

        Returns a list of (session, its work, its result); an empty one if the step failed.
        """
        work = [work for _, work in scheduled]
        slots = {session: session.slot for session, _ in scheduled}
        started = time.monotonic()
        try:
            results = await self._thread.run(lambda: self._compute(work))
        except Exception as exc:
            self._take_failure(slots, exc)
            return []
        self._guard.num_failed_steps = 0
        if self.timeline is not None:
            self.timeline.span(self._step_name, started, time.monotonic(), **self._describe(work, results))
        return [(*piece, result) for piece, result in zip(scheduled, results, strict=True)]

    def _take_failure(self, slots: Mapping[SessionT, int | None], exc: Exception) -> None:
        """After a failed step, end the sessions that cannot go on, or the engine after too many such steps.

        Args:
            slots: sessions of the step, each with the slot that it had when the step began.
            exc: the step's error.
        """
        logger.error("a step over %d sessions failed", len(slots), exc_info=exc)
        ended = self._guard.take_failure(slots, exc)
        if self._guard.num_failed_steps >= MAX_FAILED_STEPS:
            self._break(f"{MAX_FAILED_STEPS} steps in a row failed")
            return
        for session, slot in slots.items():
            if session.slot is None:  # closed meanwhile
                self._admission.forget(slot)
        for session, error in ended:
            self._end(session, error)

    def _end(self, session: SessionT, error: Exception) -> None:
        session.fail(error)
        self.close(session)
