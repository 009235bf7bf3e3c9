"""Guard of an engine's steps: the thread that runs them, and the recovery after a step that fails.

After a failed step, each of its sessions is computed again from its committed tokens. A session for which a device
draws random numbers of its own would get other tokens, so it ends with an error. The others become suspects: each takes
its next step alone. If that step fails too, its session ends with an error; the rest only lose time.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeAlias, TypeVar

from specdec.inference.engine.admission import Holder
from specdec.inference.errors import InternalError

MAX_FAILED_STEPS = 8
"""Failed steps in a row after which the engine refuses all further requests."""
SHRUNK_STEPS = 100
"""Number of steps for which fewer sessions share a step, after memory ran out."""

NO_MEMORY = re.compile("OutOfMemory|bad_alloc|allocate memory")
"""Pattern in the class name or text of errors, other than MemoryError, that mean that memory ran out: devices have
classes of their own, and ONNX Runtime and torch raise RuntimeError when a CPU's memory is full."""


class EngineSession(Holder, Protocol):
    """Session of an engine: what the engine's loop needs to recover after a failed step."""

    def replay(self) -> None:
        """Let the session be computed again after a failed step that it may have caused: `is_suspect` is then True."""

    @property
    def is_suspect(self) -> bool:
        """Return whether the session may have made a step fail: it has done no step since its `replay`."""


T = TypeVar("T")
SessionT = TypeVar("SessionT", bound=EngineSession)
WorkT = TypeVar("WorkT")
Scheduler: TypeAlias = Callable[[Sequence[SessionT]], list[tuple[SessionT, WorkT]]]


class ModelThread:
    """Thread of an engine on which its model runs, one function after another; a running one cannot be interrupted."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self.began: float | None = None
        """Monotonic seconds at which the running function began; None if none runs."""

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, function)

    def _run(self, function: Callable[[], T]) -> T:
        self.began = time.monotonic()
        try:
            return function()
        finally:
            self.began = None

    def close(self) -> None:
        """End the thread after the function that it runs, without waiting for that function, which may never return."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class StepGuard(Generic[SessionT, WorkT]):
    """Choice of the sessions for each step, so that a session that makes its steps fail does not end the others.

    A session that was in a failed step is a suspect: it gets a step alone, before all other sessions.

    Args:
        schedule: function that returns, of the sessions given to it, those that have work for the next step, each with
            that work.
        can_replay: function that returns whether a session's tokens would be the same if it is computed again.
    """

    def __init__(self, schedule: Scheduler[SessionT, WorkT], can_replay: Callable[[SessionT], bool]) -> None:
        self._schedule, self._can_replay = schedule, can_replay
        self._suspects: deque[SessionT] = deque()
        self._num_together = 0  # limit of sessions per step, up to the step `_shrunk_until`
        self._shrunk_until = self._num_steps = 0
        self.num_failed_steps = 0
        """Failed steps since the last one that succeeded."""

    def next_step(self, running: Sequence[SessionT]) -> list[tuple[SessionT, WorkT]]:
        """Return the sessions of the next step, each with its work.

        While there are sessions whose latest step failed, it is one of these alone.
        """
        while self._suspects:
            suspect = self._suspects[0]
            if suspect.slot is not None and suspect.is_suspect and (work := self._schedule((suspect,))):
                return work
            self._suspects.popleft()
        return self._together(self._schedule(running))

    def _together(self, scheduled: list[tuple[SessionT, WorkT]]) -> list[tuple[SessionT, WorkT]]:
        """Return the sessions and work of one step: all, or some in turn while a lack of memory limits their number."""
        self._num_steps += 1
        if self._num_steps > self._shrunk_until or len(scheduled) <= self._num_together:
            return scheduled
        first = self._num_steps * self._num_together % len(scheduled)
        return [*scheduled[first:], *scheduled[:first]][: self._num_together]

    def take_failure(self, sessions: Collection[SessionT], exc: Exception) -> list[tuple[SessionT, Exception]]:
        """Let each session of a failed step take its next step alone, except those that must end.

        A session must end if the step was the one that it took alone after an earlier failure, or if it would get other
        tokens when computed again.

        Args:
            sessions: sessions of the step; those that have no slot any more are left out.
            exc: the step's error.

        Returns:
            The sessions that must end, each with its error.
        """
        self.num_failed_steps += 1
        if isinstance(exc, MemoryError) or NO_MEMORY.search(f"{type(exc).__name__}: {exc}"):
            self._num_together = max(1, len(sessions) // 2)
            self._shrunk_until = self._num_steps + SHRUNK_STEPS
        tried = len(sessions) == 1 and all(session.is_suspect for session in sessions)
        ended = []
        for session in (each for each in sessions if each.slot is not None):  # others were closed meanwhile
            session.replay()
            if tried or not self._can_replay(session):
                ended.append((session, _failure(exc, tried=tried)))
            else:
                self._suspects.append(session)
        return ended


def _failure(exc: Exception, *, tried: bool) -> Exception:
    """Return the error with which a session ends after a failed step.

    Args:
        exc: the step's error.
        tried: True if the step ran for this session alone, since an earlier step with it had failed.
    """
    if isinstance(exc, InternalError):
        return exc
    if tried:
        return InternalError("the model failed on this request; the server's log has the cause")
    return InternalError("the model failed, and what it samples on the device cannot be computed again; ask again")
