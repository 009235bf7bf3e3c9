"""Pool of a target's draft workers, which assigns workers to sessions. It does not know the wire.

A session decodes without draft tokens until a worker has room for it. The worker then helps the session: it proposes
draft tokens for it. Workers come and go at any time. A session that loses its worker moves to another, or decodes alone
until there is one.

A worker begins with few sessions, whatever capacity it advertises, and gets more as its draft tokens are accepted. A
worker that proposes nothing useful to a session loses the session to another worker, and its limit falls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.inference.commit import Commit, TokenEvent
from specdec.inference.config import DEFAULT_IDLE_TIMEOUT_S, DEFAULT_WORKER_SLOTS
from specdec.inference.engine.contract import VerificationEngine, VerificationSession
from specdec.inference.errors import CapacityError, InvalidRequestError
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.speculation.tree import MAX_TREE_TOKENS, Branch

logger = logging.getLogger(__name__)

MAX_WORKERS = 1024
"""Most workers that help all requests; as many more may be private ones, which help one client each."""
FIRST_SESSIONS = 4
"""Most sessions of a worker that has just been attached."""
MAX_SILENT_COMMITS = 64
"""Most commits of a session in a row without a proposal of its worker, which should send one at least every 16."""
MAX_VAIN_COMMITS = 256
"""Most commits of a session in a row that accept nothing from its worker; meanwhile no other worker can help it."""
MAX_EARLY_SESSIONS = 64
"""Most requests that have not arrived yet for which draft tokens of one private worker are kept."""
PATIENCE_S = 1.0
"""Longest wait for a proposal, in seconds, where the target and not the request has chosen synchronous rounds."""
EARLY_S = 5.0
"""Longest time, in seconds, that draft tokens are kept before their request arrives, usually within a round trip."""


class Worker(Protocol):
    """Draft worker that is attached to the pool. Its methods send a message and return at once."""

    id: str
    num_slots: int
    does_rounds: bool
    scope: str
    """Beginning of the names of all sessions that a private worker drafts for; empty for a worker that helps all."""

    def open(self, session: VerificationSession) -> None:
        """Ask the worker to draft for this session, after the session's present tokens."""

    def commit(self, session: VerificationSession, commit: Commit) -> None:
        """Send the worker the tokens that a session has just committed."""

    def close(self, session: VerificationSession) -> None:
        """Ask the worker to stop drafting for this session."""


@dataclass(slots=True)
class _Early:
    """Messages of a private worker that came before their request; `since` is the time of the first message."""

    since: float
    branches: list[Branch] = field(default_factory=list)
    is_declined: bool = False


@dataclass(slots=True)
class _Record:
    """One attached draft worker, as the pool knows it.

    Attributes:
        sessions: sessions for which the worker drafts, by `help_id`.
        trust: most sessions that the worker may have now; grows while its draft tokens are accepted.
        early: proposals of a private worker for requests that have not arrived, by session name, oldest first.
    """

    sessions: dict[str, VerificationSession] = field(default_factory=dict)
    trust: int = FIRST_SESSIONS
    early: dict[str, _Early] = field(default_factory=dict)

    def keep(self, name: str, branches: Sequence[Branch] = (), *, is_declined: bool = False) -> None:
        """Keep a message about a request that has not arrived, within bounds of number, tokens and time."""
        now = time.monotonic()
        early = self.early.setdefault(name, _Early(now))
        early.is_declined |= is_declined
        early.branches += branches
        if sum(len(branch.token_ids) for branch in early.branches) > MAX_TREE_TOKENS:
            early.branches.clear()  # node numbers of later ones would be wrong; the pool finds out, and ends the help
        oldest = next(iter(self.early))
        if len(self.early) > MAX_EARLY_SESSIONS or now - self.early[oldest].since > EARLY_S:
            del self.early[oldest]


@dataclass(slots=True)
class _Help:
    """Record of the help that one session gets from draft workers.

    Attributes:
        worker: the worker that proposes; None while the session decodes alone.
        num_silent: commits since the worker's latest proposal.
        num_vain: commits since the target last accepted a draft token of the worker.
        useless: ids of the workers that declined the session, or proposed too few tokens that were accepted.
    """

    worker: Worker | None = None
    num_silent: int = 0
    num_vain: int = 0
    useless: set[str] = field(default_factory=set)


class DraftPool:
    """Assignment of draft workers to the sessions of an engine, by free capacity; a `TokenSource` over that engine.

    Args:
        max_worker_slots: most sessions of one worker of the pool.
        idle_timeout_s: seconds that a session in rounds may wait for a proposal before it decodes alone.
    """

    def __init__(
        self,
        engine: VerificationEngine[Any],
        *,
        max_worker_slots: int = DEFAULT_WORKER_SLOTS,
        idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S,
    ) -> None:
        self._engine = engine
        self._idle_timeout_s = idle_timeout_s
        self._max_worker_slots = max_worker_slots
        self._workers: dict[Worker, _Record] = {}
        self._alone: dict[str, VerificationSession] = {}
        self._help: dict[str, _Help] = {}
        self._named: dict[str, VerificationSession] = {}  # by the name that a private worker knows
        self._private: dict[str, Worker] = {}  # by scope
        self.max_length, self.vocab_size = engine.max_length, engine.vocab_size
        self.seed_invariant = engine.seed_invariant

    @property
    def pass_us(self) -> int:
        """Return the recent time of a pass of the engine, in microseconds; 0 while unknown."""
        return self._engine.pass_us

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Answer a request, see `TokenSource`; a request with gamma 0 gets no worker."""
        grammar = await self._engine.compiled(request)
        session: VerificationSession = self._engine.open(request, grammar=grammar)
        try:
            if request.gamma != 0:
                self._begin(session)
            async with aclosing(self._engine.answer(session)) as events:
                async for event in events:
                    if isinstance(event, Commit):
                        self._count_help(session, event)
                    yield event
        finally:
            self._leave(session)
            self._engine.close(session)

    def attach(self, worker: Worker) -> None:
        """Add a draft worker to the pool.

        Raises:
            CapacityError: there are `MAX_WORKERS` already.
        """
        if sum(bool(each.scope) == bool(worker.scope) for each in self._workers) >= MAX_WORKERS:
            raise CapacityError(f"{MAX_WORKERS} draft workers are attached already", retry_after_s=60.0)
        self._workers[worker] = _Record()
        if worker.scope:
            self._private[worker.scope] = worker
        logger.info("draft worker %s attached with %d slots", worker.id, worker.num_slots)
        self._lend()

    def detach(self, worker: Worker) -> None:
        """Remove a worker; its sessions move to other workers."""
        record = self._workers.pop(worker, _Record())
        if self._private.get(worker.scope) is worker:
            del self._private[worker.scope]
        logger.info("draft worker %s left; sessions that move on: %d", worker.id, len(record.sessions))
        for session in record.sessions.values():
            self._put_back(session)
        self._lend()

    def propose(self, worker: Worker, help_id: str, branches: Sequence[Branch]) -> None:
        """Pass on a worker's branches for a session; ignore them if the session is no longer the worker's.

        Raises:
            InvalidRequestError: a branch names a parent that never existed, or an unknown token id. For a private
                worker nothing is raised, but the worker loses the session.
        """
        record = self._workers.get(worker)
        if record is None:
            return
        if worker.scope:
            self._propose_private(worker, record, help_id, branches)
        elif (session := record.sessions.get(help_id)) is not None:
            self._grow(session, branches)

    def _grow(self, session: VerificationSession, branches: Sequence[Branch]) -> None:
        if not branches and session.runs_ahead:
            raise InvalidRequestError("empty proposal: a worker that runs ahead must send draft tokens")
        self._help[session.id].num_silent = 0
        self._engine.propose(session, branches)

    def _propose_private(self, worker: Worker, record: _Record, help_id: str, branches: Sequence[Branch]) -> None:
        name = worker.scope + help_id
        session = self._named.get(name)
        if session is None:
            record.keep(name, branches)
            return
        help_ = self._help[session.id]
        if worker.id in help_.useless:
            return
        if help_.worker is not worker:
            self._adopt(session, worker)
        try:
            self._grow(session, branches)
        except InvalidRequestError as exc:
            text = "session %s goes on without its private worker %s: %s"
            logger.warning(text, session.id, worker.id, exc, extra={"request_id": session.request_id})
            self._take_back(session, worker, trust=record.trust)

    def _begin(self, session: VerificationSession) -> None:
        """Assign a new session to the private worker of its client if there is one, else to a worker of the pool."""
        self._alone[session.id], self._help[session.id] = session, _Help()
        if name := session.request.draft_session:
            self._named[name] = session
            worker = self._private_of(session)
            if worker is None:
                logger.info("session %s: its private draft worker is not attached on its connection", session.id)
            else:
                self._begin_private(session, worker, self._workers[worker])
        self._lend()

    def _begin_private(self, session: VerificationSession, worker: Worker, record: _Record) -> None:
        """Assign a private worker to a new session: now, or when the worker's first proposal arrives."""
        name = session.request.draft_session
        early = record.early.pop(name, None)
        if early is None:
            if session.request.schedule is Schedule.SYNC:
                self._hand(session, worker)
        elif early.is_declined:
            self._help[session.id].useless.add(worker.id)
        else:
            self._propose_private(worker, record, name.removeprefix(worker.scope), early.branches)

    def _private_of(self, session: VerificationSession) -> Worker | None:
        """Return the private worker that the session's client has attached on the same connection, if any."""
        scope, slash, _ = session.request.draft_session.rpartition("/")
        return self._private.get(scope + slash)

    def _adopt(self, session: VerificationSession, worker: Worker) -> None:
        """Replace a session's worker by the private worker of its client."""
        help_ = self._help[session.id]
        if help_.worker is not None:
            del self._workers[help_.worker].sessions[session.help_id]
            help_.worker.close(session)
            self._put_back(session)
        self._hand(session, worker)

    def _hand(self, session: VerificationSession, worker: Worker) -> None:
        help_ = self._help[session.id]
        help_.worker, help_.num_silent, help_.num_vain = worker, 0, 0
        schedule = session.request.schedule or self._by_load(worker)
        self._engine.begin_help(session, schedule if worker.does_rounds else Schedule.ASYNC)
        self._workers[worker].sessions[session.help_id] = self._alone.pop(session.id)
        worker.open(session)
        self._watch(session, session.help_id)

    def _by_load(self, worker: Worker) -> Schedule:
        """Return the schedule for a request that asks for none; a worker with few accepted drafts so far runs ahead."""
        return self._engine.schedule if self._workers[worker].trust > FIRST_SESSIONS else Schedule.ASYNC

    def _watch(self, session: VerificationSession, help_id: str) -> None:
        """Take a session in synchronous rounds away from its worker if the worker has proposed nothing for too long."""
        help_ = self._help.get(session.id)
        if session.runs_ahead or help_ is None or help_.worker is None or session.help_id != help_id:
            return
        limit_s = self._idle_timeout_s if session.request.schedule else min(self._idle_timeout_s, PATIENCE_S)
        left_s = limit_s - session.idle_s
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._watch, session, help_id)
            return
        text = "session %s decodes alone: no proposal came for %g s"
        logger.warning(text, session.id, limit_s, extra={"request_id": session.request_id})
        self._take_back(session, help_.worker, trust=self._workers[help_.worker].trust // 2)

    def decline(self, worker: Worker, help_id: str) -> None:
        """Move a session that its worker declines to another worker; limit the first one to its remaining sessions."""
        record = self._workers.get(worker)
        if record is None:
            return
        name = worker.scope + help_id
        session = self._named.get(name) if worker.scope else record.sessions.get(help_id)
        if session is not None and self._help[session.id].worker is worker:
            self._take_back(session, worker, trust=len(record.sessions) - 1)
        elif worker.scope and session is not None:
            self._help[session.id].useless.add(worker.id)
            self._lend()
        elif worker.scope:
            record.keep(name, is_declined=True)

    def resized(self, worker: Worker) -> None:
        """Apply a worker's new number of slots; sessions in excess move to other workers."""
        record = self._workers.get(worker, _Record())
        for session in list(record.sessions.values())[worker.num_slots :]:
            del record.sessions[session.help_id]
            worker.close(session)
            self._put_back(session)
        self._lend()

    def _lend(self) -> None:
        """Assign draft workers of the pool to sessions without one, first the worker that can take most sessions."""
        for session in list(self._alone.values()):
            useless, private = self._help[session.id].useless, self._private_of(session)
            if private is not None and private.id not in useless:
                continue  # its proposals are on their way
            if (worker := self._choice(useless)) is not None:
                self._hand(session, worker)

    def _choice(self, useless: set[str]) -> Worker | None:
        """Return the worker, of an id not in `useless`, that can take most further sessions; None if none can."""
        public = (worker for worker in self._workers if not worker.scope)
        willing = (worker for worker in public if worker.id not in useless and self._room(worker) >= 1)
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
        """Raise the worker's limit of sessions by one, since one of its draft tokens was accepted."""
        record = self._workers[worker]
        if record.trust <= max(worker.num_slots, FIRST_SESSIONS):  # above its slots it only shows that drafts were good
            record.trust += 1
            self._lend()

    def _take_back(self, session: VerificationSession, worker: Worker, *, trust: int) -> None:
        """Take a session away from a worker that does not help it; set the worker's limit of sessions to `trust`."""
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
        self._named.pop(session.request.draft_session, None)
        self._alone.pop(session.id, None)
        help_ = self._help.pop(session.id, None)
        if help_ is not None and help_.worker is not None:
            del self._workers[help_.worker].sessions[session.help_id]
            help_.worker.close(session)
            self._lend()
