"""Pool of a target's draft workers, which assigns workers to sessions. It does not know the wire.

A session decodes alone until a worker has room for it. The worker then helps it: it proposes draft tokens. Workers come
and go at any time. A session that loses its worker moves to another, or decodes alone until there is one.

A worker begins with few sessions, whatever capacity it advertises, and gets more as its draft tokens are accepted. A
worker that proposes nothing useful to a session loses the session to another worker, and its limit falls.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from inference.commit import Answer, Commit
from inference.config import DEFAULT_WORKER_SLOTS
from inference.engine.contract import VerificationEngine, VerificationSession
from inference.errors import CapacityError, InvalidRequestError
from inference.request import GenerationRequest
from inference.speculation.tree import Branch

logger = logging.getLogger(__name__)

MAX_WORKERS = 1024
FIRST_SESSIONS = 4
"""Most sessions of a worker that has just been attached."""
MAX_SILENT_COMMITS = 64
"""Most commits of a session in a row without a proposal of its worker, which should send one at least every 16."""
MAX_VAIN_COMMITS = 256
"""Most commits of a session in a row that accept nothing from its worker; meanwhile no other worker can help it."""


class Worker(Protocol):
    """Draft worker that is attached to the pool. Its methods send a message and return at once."""

    id: str
    num_slots: int

    def open(self, session: VerificationSession) -> None:
        """Let the worker draft for this session from its present tokens on."""

    def commit(self, session: VerificationSession, commit: Commit) -> None:
        """Send the tokens of a session that became final."""

    def close(self, session: VerificationSession) -> None:
        """Let the worker stop drafting for this session."""


@dataclass(slots=True)
class _Record:
    """State of one worker.

    Attributes:
        sessions: sessions that it helps, by `help_id`.
        trust: most sessions that it may have, by its success so far.
    """

    sessions: dict[str, VerificationSession] = field(default_factory=dict)
    trust: int = FIRST_SESSIONS


@dataclass(slots=True)
class _Help:
    """Help that one session gets.

    Attributes:
        worker: the worker that proposes; None while the session decodes alone.
        num_silent: commits since the worker's latest proposal.
        num_vain: commits since one accepted a draft token of the worker.
        useless: ids of workers that have declined the session, or were of no help.
    """

    worker: Worker | None = None
    num_silent: int = 0
    num_vain: int = 0
    useless: set[str] = field(default_factory=set)


class DraftPool:
    """Pool that assigns workers to sessions by free capacity, and a `Generator` that uses the engine.

    Args:
        max_worker_slots: most sessions of one worker.
    """

    def __init__(self, engine: VerificationEngine[Any], *, max_worker_slots: int = DEFAULT_WORKER_SLOTS) -> None:
        self._engine = engine
        self._max_worker_slots = max_worker_slots
        self._workers: dict[Worker, _Record] = {}
        self._alone: dict[str, VerificationSession] = {}
        self._help: dict[str, _Help] = {}
        self.max_length, self.vocab_size = engine.max_length, engine.vocab_size
        self.seed_invariant = engine.seed_invariant

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Answer, None]:
        """See `Generator`; a request with gamma 0 gets no worker."""
        session: VerificationSession = self._engine.open(
            request, drafted=False, grammar=await self._engine.compiled(request)
        )
        try:
            if request.gamma != 0:
                self._alone[session.id], self._help[session.id] = session, _Help()
                self._lend()
            async with aclosing(self._engine.answer(session)) as events:
                async for event in events:
                    if isinstance(event, Commit):
                        self._count_help(session, event)
                    yield event
        finally:
            self._leave(session)
            self._engine.close(session)

    def attach(self, worker: Worker) -> None:
        """Add a worker.

        Raises:
            CapacityError: there are `MAX_WORKERS` already.
        """
        if len(self._workers) >= MAX_WORKERS:
            raise CapacityError(f"{MAX_WORKERS} draft workers are attached already", retry_after_s=60.0)
        self._workers[worker] = _Record()
        logger.info("draft worker %s attached with %d slots", worker.id, worker.num_slots)
        self._lend()

    def detach(self, worker: Worker) -> None:
        """Remove a worker; its sessions move to others."""
        record = self._workers.pop(worker, _Record())
        logger.info("draft worker %s left; %d sessions move on", worker.id, len(record.sessions))
        for session in record.sessions.values():
            self._put_back(session)
        self._lend()

    def propose(self, worker: Worker, help_id: str, branches: Sequence[Branch]) -> None:
        """Pass on a worker's branches for a session; ignore them if the session is no longer the worker's.

        Raises:
            InvalidRequestError: there are no branches, a parent never existed, or a token id is unknown.
        """
        session = self._workers[worker].sessions.get(help_id) if worker in self._workers else None
        if session is None:
            return
        if not branches:
            raise InvalidRequestError("empty proposal: a pool worker must send draft tokens")
        self._help[session.id].num_silent = 0
        self._engine.propose(session, branches)

    def decline(self, worker: Worker, help_id: str) -> None:
        """Move a session that its worker declines to another; the worker's limit becomes the sessions that it keeps."""
        record = self._workers.get(worker)
        session = None if record is None else record.sessions.get(help_id)
        if record is not None and session is not None:
            self._take_back(session, worker, trust=len(record.sessions) - 1)

    def resized(self, worker: Worker) -> None:
        """Apply a worker's new number of slots; sessions beyond it move to others."""
        record = self._workers.get(worker, _Record())
        for session in list(record.sessions.values())[worker.num_slots :]:
            del record.sessions[session.help_id]
            worker.close(session)
            self._put_back(session)
        self._lend()

    def _lend(self) -> None:
        """Assign workers to sessions that decode alone, the worker with most room first."""
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
        """Return the worker with most room whose id is not in `useless`; None if there is none."""
        willing = (worker for worker in self._workers if worker.id not in useless and self._room(worker) >= 1)
        return max(willing, key=self._room, default=None)

    def _room(self, worker: Worker) -> int:
        record = self._workers[worker]
        return min(worker.num_slots, self._max_worker_slots, record.trust) - len(record.sessions)

    def _count_help(self, session: VerificationSession, commit: Commit) -> None:
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
        """Allow a worker one more session, since a draft token of it was accepted."""
        record = self._workers[worker]
        if record.trust < worker.num_slots:
            record.trust += 1
            self._lend()

    def _take_back(self, session: VerificationSession, worker: Worker, *, trust: int) -> None:
        """Take a session from a worker that does not help it; set the worker's limit of sessions to `trust`."""
        record = self._workers[worker]
        del record.sessions[session.help_id]
        record.trust = max(1, trust)
        self._help[session.id].useless.add(worker.id)
        worker.close(session)
        self._put_back(session)
        self._lend()

    def _put_back(self, session: VerificationSession) -> None:
        self._help[session.id].worker = None
        self._engine.end_help(session)
        self._alone[session.id] = session

    def _leave(self, session: VerificationSession) -> None:
        self._alone.pop(session.id, None)
        help_ = self._help.pop(session.id, None)
        if help_ is not None and help_.worker is not None:
            del self._workers[help_.worker].sessions[session.help_id]
            help_.worker.close(session)
            self._lend()
