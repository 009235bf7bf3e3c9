"""Match of private draft workers with the sessions of their clients, by name.

A private worker drafts in the process of a client, for the requests of that client alone. The client gives each of its
requests a session name, which the worker's messages contain too. The worker's first draft tokens may arrive before the
request, or after it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from specdec.inference.engine.contract import VerificationSession
from specdec.inference.engine.help import Early, Help, Helper
from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import Schedule
from specdec.inference.speculation.tree import MAX_TREE_TOKENS, Branch

logger = logging.getLogger(__name__)

MAX_EARLY_SESSIONS = 64
"""Most requests, not arrived yet, for which draft tokens of one private worker (of one client alone) are kept."""
EARLY_S = 5.0
"""Seconds that draft tokens are kept for a request that has not arrived; it usually comes within a round trip."""


class PrivateMatch:
    """Match of each private worker, which drafts for one client alone, with the sessions of that client.

    A session's name has two parts: the scope, which the target gives to the client's connection, and the client's own
    name.

    Args:
        lend: function that assigns other workers to the sessions without one; called when a private worker declines a
            session.
    """

    def __init__(self, lend: Callable[[], None]) -> None:
        self._lend = lend
        self._helpers: dict[str, Helper] = {}  # by scope
        self._named: dict[str, Help] = {}  # by the name that a private worker knows

    def attach(self, helper: Helper) -> None:
        """Add a private worker, by its scope; the sessions of its client's requests are matched with it from now on."""
        self._helpers[helper.worker.scope] = helper

    def detach(self, helper: Helper) -> None:
        """Remove a private worker, and the messages kept of it; if a newer one has the same scope, that one stays."""
        helper.early.clear()  # its timer may keep the record for a moment
        if self._helpers.get(helper.worker.scope) is helper:
            del self._helpers[helper.worker.scope]

    def begin(self, help_: Help) -> None:
        """Match a new session with its private worker now, or else when the worker's first proposal arrives."""
        if not (name := help_.session.request.draft_session):
            return
        self._named[name] = help_
        helper = self._helper_of(help_.session)
        if helper is None:
            logger.info("session %s: its private draft worker is not attached on its connection", help_.session.id)
        elif (early := helper.early.pop(name, None)) is None:
            if help_.session.request.schedule is Schedule.SYNC:
                help_.begin(helper)
        elif early.is_declined:
            help_.useless.add(helper.worker.id)
        else:
            self._grow(help_, helper, early.branches)

    def leave(self, help_: Help) -> None:
        """Match no further messages of a private worker with this session, which ends."""
        name = help_.session.request.draft_session
        if self._named.get(name) is help_:
            del self._named[name]

    def awaits(self, help_: Help) -> bool:
        """Return whether the session has a private worker whose proposals may still come."""
        helper = self._helper_of(help_.session)
        return helper is not None and helper.worker.id not in help_.useless

    def propose(self, helper: Helper, name: str, branches: Sequence[Branch]) -> None:
        """Pass on a private worker's branches for a session, or keep them until the session's request arrives.

        A worker whose branches are not valid loses the session.

        Args:
            helper: record of the worker.
            name: the client's own name of the session, without the scope.
            branches: the draft tokens.
        """
        name = helper.worker.scope + name
        if (help_ := self._named.get(name)) is None:
            _keep(helper, name, branches)
        elif helper.worker.id not in help_.useless:
            self._grow(help_, helper, branches)

    def decline(self, helper: Helper, name: str) -> None:
        """Let another worker draft for a session that its private worker declines.

        The session's request may not have arrived yet.

        Args:
            helper: record of the private worker.
            name: the client's own name of the session, without the scope.
        """
        name = helper.worker.scope + name
        if (help_ := self._named.get(name)) is None:
            _keep(helper, name, is_declined=True)
        elif help_.helper is helper:
            help_.take_back(trust=len(helper.sessions) - 1)
        else:
            help_.useless.add(helper.worker.id)
            self._lend()

    def _helper_of(self, session: VerificationSession) -> Helper | None:
        """Return the record of the private worker of the session's client, by its scope; None if there is none."""
        scope, slash, _ = session.request.draft_session.rpartition("/")
        return self._helpers.get(scope + slash)

    def _grow(self, help_: Help, helper: Helper, branches: Sequence[Branch]) -> None:
        if help_.helper is not helper:
            help_.end()
            help_.begin(helper)
        try:
            help_.propose(branches)
        except InvalidRequestError as exc:
            session, text = help_.session, "session %s goes on without its private worker %s: %s"
            logger.warning(text, session.id, helper.worker.id, exc, extra={"request_id": session.request_id})
            help_.take_back(trust=helper.trust)


def _keep(helper: Helper, name: str, branches: Sequence[Branch] = (), *, is_declined: bool = False) -> None:
    """Keep a private worker's message about a request that has not arrived.

    The messages about at most `MAX_EARLY_SESSIONS` requests are kept; those about the oldest one are dropped first.

    Args:
        helper: record of the worker.
        name: the session's whole name.
        branches: draft tokens for the session.
        is_declined: True if the worker declines the session.
    """
    early = helper.early.setdefault(name, Early(time.monotonic()))
    early.is_declined |= is_declined
    early.branches += branches
    if sum(len(branch.token_ids) for branch in early.branches) > MAX_TREE_TOKENS:
        early.branches.clear()  # node numbers of later ones would be wrong; the pool finds out, and ends the help
    if len(helper.early) > MAX_EARLY_SESSIONS:
        del helper.early[next(iter(helper.early))]
    if helper.sweep is None:
        _sweep(helper)


def _sweep(helper: Helper) -> None:
    """Drop a worker's messages that came `EARLY_S` seconds ago, or earlier, and whose requests have not arrived since.

    A timer calls this function again when the next messages of the worker become so old.
    """
    now = time.monotonic()
    helper.early = {name: early for name, early in helper.early.items() if early.since + EARLY_S > now}
    # Between two times of the clock, so that the timer never lasts less than the clock can tell apart.
    left_s = min((early.since + EARLY_S - now for early in helper.early.values()), default=None)
    helper.sweep = None if left_s is None else asyncio.get_running_loop().call_later(left_s, _sweep, helper)
