"""Pool of a target's draft workers, which assigns workers to sessions. It does not know the network protocol.

A session decodes alone, that is without draft tokens, until a worker has room for it. The worker then helps the
session: it proposes draft tokens. Workers come and go at any time. A session that loses its worker moves to another, or
decodes alone until there is one.

A worker begins with few sessions, whatever capacity it advertises, and gets more as its draft tokens are accepted. A
worker that proposes nothing useful to a session loses the session to another worker, and its limit falls (help.py).
Private workers, each in the process of a client, draft for the sessions of that client alone (private_match.py).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from specdec.inference.commit import Commit, TokenEvent
from specdec.inference.config import DEFAULT_IDLE_TIMEOUT_S, DEFAULT_WORKER_SLOTS
from specdec.inference.engine.contract import VerificationEngine, VerificationSession
from specdec.inference.engine.help import Help, Helper, Worker
from specdec.inference.engine.private_match import PrivateMatch
from specdec.inference.errors import CapacityError
from specdec.inference.request import GenerationRequest
from specdec.inference.speculation.tree import Branch

logger = logging.getLogger(__name__)

MAX_WORKERS = 1024
"""Most workers that help the sessions of all clients; as many more may be private, that is, help one client each."""


class DraftPool:
    """Assignment of draft workers to the sessions of an engine, by free capacity; a `TokenSource` over that engine.

    Args:
        engine: engine that decodes and verifies; also an attribute.
        max_worker_slots: most sessions of one worker.
        idle_timeout_s: seconds that a session may wait for a proposal, in synchronous rounds, before it loses its
            worker.
    """

    def __init__(
        self,
        engine: VerificationEngine[Any],
        *,
        max_worker_slots: int = DEFAULT_WORKER_SLOTS,
        idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S,
    ) -> None:
        self.engine = engine
        self._idle_timeout_s = idle_timeout_s
        self._max_worker_slots = max_worker_slots
        self._workers: dict[Worker, Helper] = {}
        self._helped: dict[str, Help] = {}  # by session id
        self._private = PrivateMatch(self._lend)
        self._num_holds = 0
        self._computing: set[Worker] = set()
        engine.drafting.follow(self)
        self.max_length, self.vocab_size = engine.max_length, engine.vocab_size
        self.seed_invariant = engine.seed_invariant

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield a request's events, as `TokenSource.generate` does, while a draft worker proposes tokens for it.

        A request with gamma 0, that is without draft tokens, gets no worker.
        """
        grammar = await self.engine.compiled(request)
        session: VerificationSession = self.engine.open(request, grammar=grammar)
        try:
            if request.gamma != 0:
                self._begin(session)
            async with aclosing(self.engine.answer(session)) as events:
                async for event in events:
                    if isinstance(event, Commit) and (help_ := self._helped.get(session.id)) is not None:
                        help_.count(event)
                    yield event
        finally:
            self._leave(session)
            self.engine.close(session)

    def attach(self, worker: Worker) -> None:
        """Add a draft worker to the pool.

        Raises:
            CapacityError: `MAX_WORKERS` workers of the same kind, for all clients or for one client, are attached.
        """
        if sum(bool(each.scope) == bool(worker.scope) for each in self._workers) >= MAX_WORKERS:
            raise CapacityError(f"{MAX_WORKERS} draft workers are attached already", retry_after_s=60.0)
        helper = self._workers[worker] = Helper(worker)
        self._computing.add(worker)
        if not self.engine.drafting.is_on:
            worker.hold(self._num_holds, is_on=True)
        if worker.scope:
            self._private.attach(helper)
        logger.info("draft worker %s attached with %d slots", worker.id, worker.num_slots)
        self._lend()

    def detach(self, worker: Worker) -> None:
        """Remove a worker; its sessions move to other workers."""
        helper = self._workers.pop(worker, Helper(worker))
        self._computing.discard(worker)
        self._private.detach(helper)
        logger.info("draft worker %s left; sessions that move on: %d", worker.id, len(helper.sessions))
        for help_ in list(helper.sessions.values()):
            help_.end()
        self._lend()

    @property
    def computes(self) -> bool:
        """Return whether any worker may be computing."""
        return bool(self._computing)

    @property
    def can_hold(self) -> bool:
        """Return whether all workers stop when they are asked to; workers of earlier versions do not."""
        return all(worker.takes_hold for worker in self._workers)

    def hold(self, *, is_on: bool) -> None:
        """Let all workers draft if `is_on`, else ask them to stop drafting; they keep their sessions meanwhile."""
        self._num_holds += 1
        self._computing.update(self._workers)
        for help_ in self._helped.values():
            help_.resume()
        for worker in self._workers:
            worker.hold(self._num_holds, is_on=not is_on)
        self._lend()

    def held(self, worker: Worker, number: int) -> None:
        """Take note that a worker has stopped, as `hold` asked it to; `number` tells which call it answers."""
        if number == self._num_holds and not self.engine.drafting.is_on:
            self._computing.discard(worker)

    def propose(self, worker: Worker, help_id: str, branches: Sequence[Branch]) -> None:
        """Add a worker's draft tokens to a session's tree; drop them if another worker drafts for the session by now.

        Args:
            worker: the worker that proposes.
            help_id: the name by which the worker knows the session.
            branches: draft tokens, each branch with the number of the token that it follows, its parent.

        Raises:
            InvalidRequestError: a branch names a parent that never existed, or an unknown token id. For a private
                worker nothing is raised, but the worker loses the session.
        """
        if (helper := self._workers.get(worker)) is None:
            return
        if worker.scope:
            self._private.propose(helper, help_id, branches)
        elif (help_ := helper.sessions.get(help_id)) is not None:
            help_.propose(branches)

    def decline(self, worker: Worker, help_id: str) -> None:
        """Move a session from a worker that declines it to another; limit the first worker to its remaining sessions.

        `help_id` is the name by which the worker knows the session.
        """
        if (helper := self._workers.get(worker)) is None:
            return
        if worker.scope:
            self._private.decline(helper, help_id)
        elif (help_ := helper.sessions.get(help_id)) is not None:
            help_.take_back(trust=len(helper.sessions) - 1)

    def resized(self, worker: Worker) -> None:
        """Move a worker's sessions in excess of its `num_slots`, which has changed, to other workers."""
        if (helper := self._workers.get(worker)) is not None:
            for help_ in list(helper.sessions.values())[worker.num_slots :]:
                help_.end()
        self._lend()

    def _begin(self, session: VerificationSession) -> None:
        """Assign a new session to the private worker of its client if there is one, else to a worker of the pool."""
        help_ = Help(session, self.engine, idle_timeout_s=self._idle_timeout_s, lend=self._lend)
        self._helped[session.id] = help_
        self._private.begin(help_)
        self._lend()

    def _leave(self, session: VerificationSession) -> None:
        if (help_ := self._helped.pop(session.id, None)) is None:
            return
        self._private.leave(help_)
        if help_.helper is not None:
            help_.leave()
            self._lend()

    def _lend(self) -> None:
        """Assign workers that serve all clients to the sessions that have no worker and await no private one.

        The session that has been without a worker for longest is first, and gets the worker that can take most further
        sessions. While drafting is off, no session gets a worker.
        """
        if not self.engine.drafting.is_on:
            return
        alone = [each for each in self._helped.values() if each.helper is None and not self._private.awaits(each)]
        for help_ in sorted(alone, key=lambda each: each.alone_since):
            if (helper := self._choice(help_.useless)) is not None:
                help_.begin(helper)

    def _choice(self, useless: set[str]) -> Helper | None:
        """Return the record of the worker, of those that serve all clients, that can take most further sessions.

        None if no worker can take any.

        Args:
            useless: ids of workers that must not be chosen.
        """
        public = (each for each in self._workers.values() if not each.worker.scope)
        willing = (each for each in public if each.worker.id not in useless and self._room(each) >= 1)
        return max(willing, key=self._room, default=None)

    def _room(self, helper: Helper) -> int:
        return min(helper.worker.num_slots, self._max_worker_slots, helper.trust) - len(helper.sessions)
