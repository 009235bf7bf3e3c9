"""The resume loop: one request's answer, over as many servers as it takes.

A gateway, a client and a draft worker use the same loop. It decides whether, when, where and how often the rest of an
answer is asked for after a server was lost; the `attempt` knows what to ask a server, and how to check its events.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from typing import Generic, Protocol, TypeVar

from inference.commit import Commit, Delta
from inference.config import ConnectionConfig
from inference.errors import (
    CapacityError,
    DeadlineError,
    HandshakeError,
    InternalError,
    RequestError,
    SpecDecError,
    UnavailableError,
)
from inference.scheduling.retry_budget import SIZE
from inference.workers.dialling import check_link
from inference.workers.fleet import REFUSES_US, Fleet, Replica
from inference.workers.remote import MAX_DEADLINE_S

logger = logging.getLogger(__name__)

REDIAL_S = 0.25
MAX_REDIAL_S = 2.0
"""Waits before dialling again are drawn from 0 to this, doubling from `REDIAL_S`: a crowd must not dial in step."""
MAX_BARREN_RESUMES = 3
"""Streams in a row that a server took and broke without a token: the request may be what breaks the servers."""

RESUMABLE = (UnavailableError, CapacityError, InternalError, DeadlineError)


EventT = TypeVar("EventT")


class Progress(Protocol[EventT]):
    """Answer of one request so far, from all servers that gave a part of it."""

    @property
    def has_begun(self) -> bool:
        """Whether any server has answered."""

    @property
    def answered(self) -> bool:
        """Whether the latest server has, or would have: if the stream broke then, it was not for want of a server."""

    @property
    def has_ended(self) -> bool:
        """Whether no token is missing."""

    @property
    def closing(self) -> EventT | None:
        """The last event of an answer that has ended, if no server has sent it."""

    def take(self, event: EventT) -> bool:
        """Note an event; return False if the client has it already."""

    def lost(self, exc: SpecDecError) -> None:
        """Note that the latest server was lost.

        Raises:
            SpecDecError: no other server can go on.
        """


class Resuming(Generic[EventT]):
    """One request's attempts.

    Args:
        progress: of the request.
        fleet: the servers that it may go to.
        connection: how long it may take, and be without a server.
        waits_to_begin: for a server, also before any has answered; otherwise it is refused then, unless one was there
            lately.
        deadline: the event loop's time at which it ends, if that is before the connection's own.
    """

    def __init__(
        self,
        progress: Progress[EventT],
        fleet: Fleet,
        connection: ConnectionConfig,
        *,
        waits_to_begin: bool = False,
        deadline: float | None = None,
    ) -> None:
        self._progress = progress
        self._fleet = fleet
        self._patience_s = connection.reconnect_timeout_s
        self._waits_to_begin = waits_to_begin
        ends_at = asyncio.get_running_loop().time() + min(connection.deadline_s, MAX_DEADLINE_S)
        self._ends_at = ends_at if deadline is None else min(ends_at, deadline)
        self._lost_at: float | None = None
        self._num_dials = self._num_barren = 0
        self._has_tokens = False
        self._latest: Replica | None = None
        self._failed: set[str] = set()  # where, since its latest token
        self._unfit: set[str] = set()  # who cannot go on with it

    @property
    def left_s(self) -> float:
        """Seconds until the request's deadline."""
        return max(0.0, self._ends_at - asyncio.get_running_loop().time())

    @property
    def _has_begun(self) -> bool:
        return self._has_tokens or self._progress.has_begun

    @property
    def _goes_on_at_once(self) -> bool:
        """Whether there is a server where it has not failed."""
        return self._fleet.has_other(*self._failed, *self._unfit)

    async def events(
        self, attempt: Callable[[Replica], AsyncGenerator[EventT, None]], prefix: str
    ) -> AsyncGenerator[EventT, None]:
        """Yield the answer's events to the last one.

        Args:
            attempt: asks one server for what is missing, and yields its events.
            prefix: hash of the prompt's beginning; a server that has read it is preferred.

        Raises:
            SpecDecError: no server can go on, or the request's time is over.
        """
        while not self._progress.has_ended:
            try:
                with self._leased(prefix) as replica:
                    async with aclosing(attempt(replica)) as events:
                        async for event in events:
                            if isinstance(event, Delta | Commit) and event.token_ids:
                                self._progressed()
                            if self._progress.take(event):
                                yield event
            except RESUMABLE as exc:
                if not self._progress.has_ended:
                    self._progress.lost(exc)
                    await self._pause(exc)
        if (closing := self._progress.closing) is not None:
            yield closing

    @contextmanager
    def _leased(self, prefix: str) -> Generator[Replica, None, None]:
        """Lease the server to ask now; a failure in the block is one of RESUMABLE if another one may do better."""
        replica: Replica | None = None
        self._latest = None
        try:
            with self._fleet.lease(prefix=prefix, failed=self._failed, unfit=self._unfit) as replica:
                self._latest = replica
                yield replica
        except RequestError as exc:  # of one that cannot go on: another model, too short a context, no trust in us
            if replica is None or not (self._progress.has_begun or isinstance(exc, REFUSES_US)):
                raise
            self._exclude(replica, exc)
            raise UnavailableError(exc.message, address=exc.address) from exc
        except RESUMABLE:
            if replica is not None:
                self._failed.add(replica.address)
            raise

    def _progressed(self) -> None:
        """Note that a token has come."""
        self._has_tokens = True
        if self._lost_at is not None:
            logger.info("a request goes on after %.1f s", time.monotonic() - self._lost_at)
            self._fleet.budget.give_back()
            self._lost_at = None
        self._num_dials = self._num_barren = 0
        self._failed.clear()

    async def _pause(self, exc: SpecDecError) -> None:
        """Wait before the next attempt, after one of RESUMABLE: not at all if another server is there, but for a turn.

        Raises:
            SpecDecError: there is no sense in another one, or it has taken too long.
        """
        self._require_hope(exc)
        if not self._goes_on_at_once:  # a time drawn at random, behind what a full server asks for
            await self._check_trust(exc)
            asked_s = min(exc.retry_after_s, MAX_REDIAL_S) if isinstance(exc, CapacityError) else 0.0
            await asyncio.sleep(asked_s + random.uniform(0.0, min(MAX_REDIAL_S, REDIAL_S * 2**self._num_dials)))
            self._num_dials += 1
        refused = isinstance(exc, CapacityError) and not self._has_begun
        while not self._fleet.budget.take(time.monotonic(), spare=SIZE / 2 if refused else 0.0):
            if refused and self._lost_at is not None and time.monotonic() - self._lost_at > MAX_REDIAL_S:
                raise exc  # where all servers are full, that is to be heard
            self._check_patience(exc)
            await asyncio.sleep(random.uniform(0.0, 4 * REDIAL_S))

    def _require_hope(self, exc: SpecDecError) -> None:
        if isinstance(exc, DeadlineError) and not self.left_s:
            raise exc
        if self._lost_at is None:  # once, not at every attempt
            self._lost_at = time.monotonic()
            logger.info("lost the server of a request: %s", exc)
        is_full = isinstance(exc, CapacityError)
        self._num_barren += isinstance(exc, InternalError) or (self._progress.answered and not is_full)
        if exc.is_final:
            raise exc
        if self._num_barren >= MAX_BARREN_RESUMES:
            last = _last(exc)
            last.is_final = True  # or the caller of this server would break as many others with it
            raise last
        if self._goes_on_at_once:
            return
        # A full server refuses a new request, but a resume waits for its place, which its own lost stream may hold.
        if not self._has_begun and (is_full or not (self._waits_to_begin or self._fleet.has_served_lately)):
            raise exc
        self._check_patience(exc)

    async def _check_trust(self, exc: SpecDecError) -> None:
        """A server that is not trusted is not lost.

        Raises:
            HandshakeError: no other one is left.
        """
        if self._latest is None or not isinstance(exc, UnavailableError):
            return
        try:
            await check_link(self._latest.address, self._latest.security)
        except HandshakeError as fault:
            self._exclude(self._latest, fault)

    def _exclude(self, replica: Replica, exc: SpecDecError) -> None:
        """Ask this server no more; raise `exc` if it is the last."""
        self._unfit.add(replica.address)
        if self._unfit.issuperset(self._fleet.addresses):
            raise exc

    def _check_patience(self, exc: SpecDecError) -> None:
        if self._lost_at is not None and time.monotonic() - self._lost_at > self._patience_s:
            raise _last(exc)


def _last(exc: SpecDecError) -> SpecDecError:
    """Return the client's error: a fault stays one, all else is a server that is not there."""
    return exc if isinstance(exc, InternalError) else UnavailableError(exc.message, address=exc.address)
