"""The target's pool of draft workers: who helps which session. Knows no wire.

Sessions live at the target and decode by themselves; a worker that has room is lent to them. Workers come and go at any
time. A session whose worker goes is moved to another, or decodes alone until there is one.

A worker is believed no more than it gives: it begins with few sessions, whatever it claims to have room for, gets more
as its drafts are accepted, and less for each session that it leaves without a word; those are moved on.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from inference.commit import Answer, Commit
from inference.config import DEFAULT_WORKER_SLOTS
from inference.engine.target import TargetEngine
from inference.engine.target_session import TargetSession
from inference.errors import CapacityError, InvalidRequestError
from inference.request import GenerationRequest
from inference.speculation.tree import Branch

logger = logging.getLogger(__name__)

MAX_WORKERS = 1024
FIRST_SESSIONS = 4
"""Sessions of a worker of whom nothing is known."""
MAX_SILENT_COMMITS = 64
"""Commits of a session for which its worker may propose nothing; run-ahead sends something after 16 at the latest."""
MAX_VAIN_COMMITS = 256
"""Commits of a session in a row that may accept nothing of what its worker proposes: with it the session has neither
another worker nor what the target would look up."""


class Worker(Protocol):
    """An attached draft worker, as the pool sees it; calls never wait."""

    id: str
    num_slots: int

    def open(self, session: TargetSession) -> None:
        """Draft for this session from its present tokens on."""

    def commit(self, session: TargetSession, commit: Commit) -> None:
        """Tokens of a session became final."""

    def close(self, session: TargetSession) -> None:
        """Draft no more for this session."""


@dataclass(slots=True)
class _Record:
    """What is known of one worker.

    Attributes:
        sessions: those it helps, by what it calls them.
        trust: how many it is given at most.
    """

    sessions: dict[str, TargetSession] = field(default_factory=dict)
    trust: int = FIRST_SESSIONS


@dataclass(slots=True)
class _Help:
    """One session's help.

    Attributes:
        worker: whose.
        num_silent: commits since it has proposed anything.
        num_vain: commits since one accepted a draft token of its.
        useless: workers that have left the session without a word.
    """

    worker: Worker | None = None
    num_silent: int = 0
    num_vain: int = 0
    useless: set[str] = field(default_factory=set)


class DraftPool:
    """Lends workers to sessions, by free capacity. Serves `Generator` in front of the engine.

    Args:
        max_worker_slots: sessions that one worker is given at most.
    """

    def __init__(self, engine: TargetEngine, *, max_worker_slots: int = DEFAULT_WORKER_SLOTS) -> None:
        self._engine = engine
        self._max_worker_slots = max_worker_slots
        self._workers: dict[Worker, _Record] = {}
        self._alone: dict[str, TargetSession] = {}
        self._help: dict[str, _Help] = {}
        self.max_length, self.vocab_size = engine.max_length, engine.vocab_size
        self.seed_invariant = engine.seed_invariant

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Answer, None]:
        """See `Generator`; gamma 0 keeps the workers out."""
        session = self._engine.open(request, drafted=False, grammar=await self._engine.compiled(request))
        try:
            if request.gamma != 0:
                self._alone[session.id], self._help[session.id] = session, _Help()
                self._lend()
            async with aclosing(self._engine.answer(session)) as events:
                async for event in events:
                    if isinstance(event, Commit):
                        self._tell(session, event)
                    yield event
        finally:
            self._leave(session)
            self._engine.close(session)

    def attach(self, worker: Worker) -> None:
        """Take in a worker.

        Raises:
            CapacityError: there are `MAX_WORKERS` already.
        """
        if len(self._workers) >= MAX_WORKERS:
            raise CapacityError(f"{MAX_WORKERS} draft workers are attached already", retry_after_s=60.0)
        self._workers[worker] = _Record()
        logger.info("draft worker %s attached with %d slots", worker.id, worker.num_slots)
        self._lend()

    def detach(self, worker: Worker) -> None:
        """A worker has gone; its sessions move on."""
        record = self._workers.pop(worker, _Record())
        logger.info("draft worker %s left; %d sessions move on", worker.id, len(record.sessions))
        for session in record.sessions.values():
            self._put_back(session)
        self._lend()

    def propose(self, worker: Worker, help_id: str, branches: Sequence[Branch]) -> None:
        """A worker proposes for a session; one that is no longer its own is ignored.

        Raises:
            InvalidRequestError: the branches grow from nowhere, or hold tokens that do not exist.
        """
        session = self._workers[worker].sessions.get(help_id) if worker in self._workers else None
        if session is None:
            return
        if not branches:
            raise InvalidRequestError("a pool worker has nothing to ask for: an empty proposal")
        self._help[session.id].num_silent = 0
        self._engine.propose(session, branches)

    def decline(self, worker: Worker, help_id: str) -> None:
        """A worker will not draft for a session, which moves on; what it has now is what it has room for."""
        record = self._workers.get(worker)
        session = None if record is None else record.sessions.get(help_id)
        if record is not None and session is not None:
            self._take_back(session, worker, trust=len(record.sessions) - 1)

    def resized(self, worker: Worker) -> None:
        """A worker has room for another number of sessions now; those above it move on."""
        record = self._workers.get(worker, _Record())
        for session in list(record.sessions.values())[worker.num_slots :]:
            del record.sessions[session.help_id]
            worker.close(session)
            self._put_back(session)
        self._lend()

    def _lend(self) -> None:
        """Give sessions that are alone to the workers with most room."""
        for session in list(self._alone.values()):
            help_ = self._help[session.id]
            worker = self._choice(help_.useless)
            if worker is None:
                continue
            help_.worker, help_.num_silent, help_.num_vain = worker, 0, 0
            self._engine.begin_help(session)
            self._workers[worker].sessions[session.help_id] = self._alone.pop(session.id)
            worker.open(session)

    def _choice(self, useless: set[str]) -> Worker | None:
        """The worker with most room, of those that may be of use."""
        willing = (worker for worker in self._workers if worker.id not in useless and self._room(worker) >= 1)
        return max(willing, key=self._room, default=None)

    def _room(self, worker: Worker) -> int:
        record = self._workers[worker]
        return min(worker.num_slots, self._max_worker_slots, record.trust) - len(record.sessions)

    def _tell(self, session: TargetSession, commit: Commit) -> None:
        help_ = self._help.get(session.id)
        if help_ is None or help_.worker is None:
            return
        help_.num_silent += 1
        help_.num_vain += 1
        if commit.num_accepted_tokens > commit.own.num_accepted:
            help_.num_vain = 0
            self._trust(help_.worker)
        if help_.num_silent >= MAX_SILENT_COMMITS or help_.num_vain >= MAX_VAIN_COMMITS:
            self._take_back(session, help_.worker, trust=self._workers[help_.worker].trust // 2)
        else:
            help_.worker.commit(session, commit)

    def _trust(self, worker: Worker) -> None:
        """A worker was of use: it may be given one more."""
        record = self._workers[worker]
        if record.trust < worker.num_slots:
            record.trust += 1
            self._lend()

    def _take_back(self, session: TargetSession, worker: Worker, *, trust: int) -> None:
        """End the help of a worker that gives none: the next one may."""
        record = self._workers[worker]
        del record.sessions[session.help_id]
        record.trust = max(1, trust)
        self._help[session.id].useless.add(worker.id)
        worker.close(session)
        self._put_back(session)
        self._lend()

    def _put_back(self, session: TargetSession) -> None:
        self._help[session.id].worker = None
        self._engine.end_help(session)
        self._alone[session.id] = session

    def _leave(self, session: TargetSession) -> None:
        self._alone.pop(session.id, None)
        help_ = self._help.pop(session.id, None)
        if help_ is not None and help_.worker is not None:
            del self._workers[help_.worker].sessions[session.help_id]
            help_.worker.close(session)
            self._lend()
