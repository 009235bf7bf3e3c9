"""Help for a target's session: the draft worker that proposes tokens for it, and when it loses or changes the worker.

Also the records of the attached draft workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from specdec.inference.commit import Commit
from specdec.inference.engine.contract import VerificationEngine, VerificationSession
from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import Schedule
from specdec.inference.speculation.tree import Branch

logger = logging.getLogger(__name__)

FIRST_SESSIONS = 4
"""Most sessions for which a draft worker may draft when it has just been attached."""
MAX_SILENT_COMMITS = 64
"""Commits in a row without a proposal, after which a session loses its worker. Workers propose at least every 16."""
MAX_VAIN_COMMITS = 256
"""Commits in a row without an accepted token of its worker, after which a session loses it, and may get another."""
PATIENCE_S = 1.0
"""Longest wait for a proposal, in seconds, where the target and not the request has chosen synchronous rounds."""


class Worker(Protocol):
    """Draft worker that is attached to a target's pool. Its methods send a message and return at once.

    Attributes:
        id: name of the worker in logs; a worker that attaches again may have the same.
        num_slots: most sessions that it has room for.
        does_rounds: True if it can draft in synchronous rounds; otherwise it only runs ahead.
        takes_hold: True if it can be told by `hold` to stop computing, and confirms that it has stopped.
        scope: for a private worker, which drafts for one client alone, the beginning of the names of that client's
            sessions; empty for a worker that helps the sessions of all clients.
    """

    id: str
    num_slots: int
    does_rounds: bool
    takes_hold: bool
    scope: str

    def open(self, session: VerificationSession) -> None:
        """Ask the worker to draft for a session, after its present tokens."""

    def commit(self, session: VerificationSession, commit: Commit) -> None:
        """Send the worker the tokens that a session has just committed."""

    def close(self, session: VerificationSession) -> None:
        """Ask the worker to stop drafting for this session."""

    def hold(self, number: int, *, is_on: bool) -> None:
        """Ask the worker to stop computing for its sessions, but to keep them; with `is_on` False, to go on.

        Args:
            number: number of this request, which the worker returns once it has stopped; see `DraftPool.held`.
            is_on: True to stop the worker, False to let it go on.
        """


@dataclass(slots=True)
class Early:
    """Messages of a private worker, which drafts for one client alone, that came before the request they are about.

    Attributes:
        since: time of the first message, in monotonic seconds.
        branches: draft tokens for the request's session.
        is_declined: True if the worker declined the session.
    """

    since: float
    branches: list[Branch] = field(default_factory=list)
    is_declined: bool = False


@dataclass(slots=True, eq=False)
class Helper:
    """Record of an attached draft worker.

    Attributes:
        worker: the worker.
        sessions: sessions for which the worker drafts, by the name under which it knows them.
        trust: most sessions that the worker may have now; grows while its draft tokens are accepted.
        early: messages about requests that have not arrived, by session name, oldest first; only from a private worker,
            which drafts for one client alone.
        sweep: timer that drops the messages in `early` once they are too old; None while there are none.
    """

    worker: Worker
    sessions: dict[str, Help] = field(default_factory=dict)
    trust: int = FIRST_SESSIONS
    early: dict[str, Early] = field(default_factory=dict)
    sweep: asyncio.TimerHandle | None = None


class Help:
    """Record of the draft worker that proposes tokens for one session, and the rules by which it changes.

    Attributes:
        helper: record of the worker that drafts for the session; None while the session decodes alone.
        alone_since: time at which the session last lost a worker, in monotonic seconds; 0 before its first one.
        useless: ids of the workers that declined the session, or were taken from it since they did not help.

    Args:
        session: the session.
        engine: the session's engine.
        idle_timeout_s: seconds that the session may wait for a proposal, in synchronous rounds, before it loses its
            worker.
        lend: function that assigns workers to the sessions without one; called when a worker has become free, or may
            have more sessions.
    """

    def __init__(
        self,
        session: VerificationSession,
        engine: VerificationEngine[Any],
        *,
        idle_timeout_s: float,
        lend: Callable[[], None],
    ) -> None:
        self.session = session
        self.helper: Helper | None = None
        self.alone_since = 0.0
        self.useless: set[str] = set()
        self._engine, self._idle_timeout_s, self._lend = engine, idle_timeout_s, lend
        self._num_silent = 0  # commits since the worker's latest proposal
        self._num_vain = 0  # commits since the target last accepted a draft token of the worker
        self._missed: list[Commit] = []  # while drafting is off

    def begin(self, helper: Helper) -> None:
        """Assign a worker to the session, which must have none, and ask it to draft for the session."""
        self.helper, self._num_silent, self._num_vain = helper, 0, 0
        worker, session = helper.worker, self.session
        schedule = session.request.schedule or self._by_load(helper)
        self._engine.begin_help(session, schedule if worker.does_rounds else Schedule.ASYNC)
        helper.sessions[session.help_id] = self
        worker.open(session)
        if not session.runs_ahead:
            # From now on: the session may be idle for long already.
            self._watch_after(self._patience_s, session.help_id)

    def _by_load(self, helper: Helper) -> Schedule:
        """Return the schedule for a request that sets none.

        It is run-ahead with a worker of which few draft tokens were accepted yet, else the engine's present schedule.
        """
        return self._engine.schedule if helper.trust > FIRST_SESSIONS else Schedule.ASYNC

    @property
    def _patience_s(self) -> float:
        return self._idle_timeout_s if self.session.request.schedule else min(self._idle_timeout_s, PATIENCE_S)

    def _watch_after(self, seconds: float, help_id: str) -> None:
        asyncio.get_running_loop().call_later(seconds, self._watch, help_id)

    def _watch(self, help_id: str) -> None:
        """Take the session, in synchronous rounds, from its worker if it has waited too long for a proposal.

        Args:
            help_id: the session's name at the worker that is watched; nothing happens if it has changed.
        """
        if self.helper is None or self.session.help_id != help_id:
            return
        left_s = self._patience_s - self.session.idle_s
        if left_s > 0:
            self._watch_after(left_s, help_id)
            return
        session, text = self.session, "session %s decodes alone: no proposal came for %g s"
        logger.warning(text, session.id, self._patience_s, extra={"request_id": session.request_id})
        self.take_back(trust=self.helper.trust // 2)

    def propose(self, branches: Sequence[Branch]) -> None:
        """Pass the worker's branches on to the engine.

        Raises:
            InvalidRequestError: a branch names a parent (the token that it follows) which never existed, or an unknown
                token id. Or `branches` is empty, which means something only in synchronous rounds.
        """
        if not branches and self.session.runs_ahead:
            raise InvalidRequestError("empty proposal: a worker that runs ahead must send draft tokens")
        self._num_silent = 0
        self._engine.propose(self.session, branches)

    def count(self, commit: Commit) -> None:
        """Send the worker a commit of the session, or take the session from a worker that is of no use to it.

        A commit made while drafting is off is kept, and sent once drafting is on.
        """
        if self.helper is None:
            return
        if commit.is_held:
            self._missed.append(commit)
            if self._engine.drafting.is_on:
                self.resume()
            return
        self.resume()
        self._num_silent += 1
        self._num_vain += 1
        if commit.num_accepted_tokens > commit.own.num_accepted:
            self._num_vain = 0
            self._trust(self.helper)
        if self._num_silent >= MAX_SILENT_COMMITS or self._num_vain >= MAX_VAIN_COMMITS:
            self.take_back(trust=self.helper.trust // 2)
        else:
            self.helper.worker.commit(self.session, commit)

    def resume(self) -> None:
        """Send the worker, as one commit, the tokens of all commits that were made while drafting was off."""
        if self.helper is not None and self._missed:
            token_ids = tuple(token_id for each in self._missed for token_id in each.token_ids)
            latest, position = self._missed[-1], self._missed[0].position
            self.helper.worker.commit(self.session, replace(latest, position=position, token_ids=token_ids))
            self._missed.clear()

    def _trust(self, helper: Helper) -> None:
        """Raise a worker's limit of sessions by one, since one of its draft tokens was accepted."""
        if helper.trust <= max(helper.worker.num_slots, FIRST_SESSIONS):  # above its slots: its drafts were good
            helper.trust += 1
            self._lend()

    def take_back(self, *, trust: int) -> None:
        """Take the session for good from its worker, if it has one; `trust` is the worker's new limit of sessions."""
        if (helper := self.helper) is None:
            return
        helper.trust = max(1, trust)
        self.useless.add(helper.worker.id)
        self.end()
        self._lend()

    def end(self) -> None:
        """Take the session from its worker, if any, and let it decode alone; it may get the same worker again."""
        if self.helper is not None:
            self.leave()
            self._engine.end_help(self.session)
            self.alone_since = time.monotonic()

    def leave(self) -> None:
        """Tell the session's worker, if any, to stop drafting for it; remove the session from the worker's record."""
        if self.helper is not None:
            self._missed.clear()
            del self.helper.sessions[self.session.help_id]
            self.helper.worker.close(self.session)
            self.helper = None
