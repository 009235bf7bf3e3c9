"""The target's pool of draft workers: who helps which session. Knows no wire.

Sessions live at the target and decode by themselves; a worker that has room is lent to them. Workers come and go at any
time. A session whose worker goes is moved to another, or decodes alone until there is one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from inference.commit import Commit
from inference.engine.target import TargetEngine
from inference.engine.target_session import TargetSession
from inference.errors import InvalidRequestError
from inference.request import GenerationRequest
from inference.speculation.tree import Branch

logger = logging.getLogger(__name__)


class Worker(Protocol):
    """An attached draft worker, as the pool sees it; calls never wait."""

    @property
    def id(self) -> str: ...

    @property
    def num_slots(self) -> int: ...

    def open(self, session: TargetSession) -> None:
        """Draft for this session from its present tokens on."""

    def commit(self, session: TargetSession, commit: Commit) -> None:
        """Tokens of a session became final."""

    def close(self, session: TargetSession) -> None:
        """Draft no more for this session."""


class DraftPool:
    """Lends workers to sessions, by free capacity. Serves `Generator` in front of the engine."""

    def __init__(self, engine: TargetEngine) -> None:
        self._engine = engine
        self._helped: dict[Worker, dict[str, TargetSession]] = {}
        self._alone: dict[str, TargetSession] = {}

    @property
    def max_length(self) -> int:
        return self._engine.max_length

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
        """See `Generator`; gamma 0 keeps the workers out."""
        session = self._engine.open(request, drafted=False, grammar=await self._engine.compiled(request))
        if request.gamma != 0:
            self._alone[session.id] = session
            self._lend()
        try:
            async with aclosing(self._engine.commits(session)) as commits:
                async for commit in commits:
                    self._tell(session, commit)
                    yield commit
        finally:
            self._leave(session)

    def attach(self, worker: Worker) -> None:
        """Take in a worker."""
        self._helped[worker] = {}
        logger.info("draft worker %s attached with %d slots", worker.id, worker.num_slots)
        self._lend()

    def detach(self, worker: Worker) -> None:
        """A worker has gone; its sessions move on."""
        sessions = self._helped.pop(worker, {})
        logger.info("draft worker %s left; %d sessions move on", worker.id, len(sessions))
        for session in sessions.values():
            self._engine.end_help(session)
        self._alone.update(sessions)
        self._lend()

    def propose(self, worker: Worker, session_id: str, branches: Sequence[Branch]) -> None:
        """A worker proposes for a session; one that is no longer its own is ignored.

        Raises:
            InvalidRequestError: the branches grow from nowhere, or hold tokens that do not exist.
        """
        session = self._helped.get(worker, {}).get(session_id)
        if session is None:
            return
        if not branches:
            raise InvalidRequestError("a pool worker has nothing to ask for: an empty proposal")
        self._engine.propose(session, branches)

    def _lend(self) -> None:
        """Give sessions that are alone to the workers with most room."""
        for session in list(self._alone.values()):
            worker = max(self._helped, key=self._room, default=None)
            if worker is None or self._room(worker) < 1:
                return
            self._helped[worker][session.id] = self._alone.pop(session.id)
            self._engine.begin_help(session)
            worker.open(session)

    def _room(self, worker: Worker) -> int:
        return worker.num_slots - len(self._helped[worker])

    def _worker_of(self, session: TargetSession) -> Worker | None:
        return next((worker for worker, sessions in self._helped.items() if session.id in sessions), None)

    def _tell(self, session: TargetSession, commit: Commit) -> None:
        worker = self._worker_of(session)
        if worker is not None:
            worker.commit(session, commit)

    def _leave(self, session: TargetSession) -> None:
        self._alone.pop(session.id, None)
        worker = self._worker_of(session)
        if worker is not None:
            del self._helped[worker][session.id]
            worker.close(session)
            self._lend()
