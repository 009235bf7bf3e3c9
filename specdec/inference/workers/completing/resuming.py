"""Loop that asks one server after another until a request is answered, and resumes an answer that a server began.

Every process that sends requests to several servers of a model runs this loop. After the loss of a server it decides
whether to request the rest of the answer, when, and from which server. A function that the caller gives, `attempt`,
sends the request and checks the events.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import replace

from specdec.inference.commit import Commit, Finished, FinishReason, Started, TextEvent
from specdec.inference.config import ConnectionConfig
from specdec.inference.errors import (
    CapacityError,
    DeadlineError,
    HandshakeError,
    InternalError,
    RequestError,
    SpecDecError,
    UnavailableError,
)
from specdec.inference.request import SeedScope
from specdec.inference.scheduling.retry_budget import SIZE
from specdec.inference.workers.calls.dialling import check_link
from specdec.inference.workers.calls.fleet import REFUSES_US, Fleet, Replica
from specdec.inference.workers.completing.reading import seed_of
from specdec.inference.workers.completing.remote import MAX_DEADLINE_S
from specdec.inference.workers.completion import CompletionRequest, Resume

logger = logging.getLogger(__name__)

REDIAL_S = 0.25
MAX_REDIAL_S = 2.0
"""Upper bounds, in seconds, of the random wait before the next attempt: `REDIAL_S` for the first wait, then twice the
bound before, but at most `MAX_REDIAL_S`.

The wait is random so that the requests of a lost server do not all connect at the same moment.
"""
MAX_BARREN_RESUMES = 3
"""Number of attempts in a row that fail without giving a token, after which the request fails, since it may be the
request that crashes the servers."""

RESUMABLE = (UnavailableError, CapacityError, InternalError, DeadlineError)


class Progress:
    """One request, and its answer so far from all servers that gave a part of it.

    Attributes:
        deadline: event-loop time at which the client stops waiting; None: never.
        answered: True if the server of the latest attempt was ready when it was chosen.
        reason: reason why the answer ended; None while it goes on.
    """

    def __init__(self, request: CompletionRequest) -> None:
        if request.draft_session:  # it names a draft worker of the caller, and a seed
            request = replace(request, seed=seed_of(request), draft_session="")
        self._request = request
        self.deadline = request.deadline
        self.answered = False
        self._started: Started | None = None
        self._token_ids: list[int] = []
        self.reason: FinishReason | None = None

    @property
    def has_begun(self) -> bool:
        return self._started is not None

    def take(self, event: TextEvent) -> bool:
        """Record an event that a server has sent; return whether the event is passed on to the client.

        Two are not: the first event (Started) of a second server, and a last event (Finished), which the loop yields
        itself at the end.
        """
        if isinstance(event, Started):
            is_news, self._started = self._started is None, self._started or event
            return is_news
        if isinstance(event, Finished):
            self.reason = event.reason
            return False
        self._token_ids += event.token_ids
        self.reason = event.finish_reason
        return True

    def lost(self, exc: SpecDecError) -> None:
        """Check that another server can continue the answer, after an attempt has failed by `exc`.

        Raises:
            UnavailableError: the answer has begun, and no other server can continue it.
        """
        if self._started is not None and not self._started.provenance.model_id:
            why = "no other server can go on: this one draws its noise on a device, or names no model"
            raise UnavailableError(f"{exc.message} ({why})", address=exc.address) from exc

    def rest(self) -> CompletionRequest:
        """Return the request to send next, which asks for what is missing of the answer.

        Parameters that the client left open get the values that the first server used. If no server has begun, return
        the client's request.
        """
        if self._started is None:
            return self._request
        defaults = self._started.defaults
        complete = self._request if defaults is None else self._request.resolved(defaults)
        resume = Resume(tuple(self._token_ids), self._started.provenance)
        complete = replace(complete, seed=self._started.seed, seed_scope=SeedScope.ALL)  # the prompt is mixed in
        return replace(complete, prompt_logprobs=None, resume=resume)


class Resuming:
    """Loop of attempts to complete one request, at one server after another.

    Args:
        progress: request, and answer so far.
        fleet: servers that may take the request.
        connection: settings with the longest time of a request, and its longest time without a server, in seconds.
        waits_to_begin: True if a new request waits while no server is ready. If False, it then fails at once, unless a
            server was ready a few seconds ago.
    """

    def __init__(self, progress: Progress, fleet: Fleet, connection: ConnectionConfig, *, waits_to_begin: bool) -> None:
        self._progress = progress
        self._fleet = fleet
        self._patience_s = connection.reconnect_timeout_s
        self._waits_to_begin = waits_to_begin
        ends_at = asyncio.get_running_loop().time() + min(connection.deadline_s, MAX_DEADLINE_S)
        self._ends_at = ends_at if progress.deadline is None else min(ends_at, progress.deadline)
        self._lost_at: float | None = None
        self._num_dials = self._num_barren = 0
        self._has_tokens = False
        self._latest: Replica | None = None
        self._failed: set[str] = set()  # addresses that failed since the latest token
        self._unfit: set[str] = set()  # addresses that cannot continue the request

    @property
    def left_s(self) -> float:
        """Return the seconds until the request's deadline."""
        return max(0.0, self._ends_at - asyncio.get_running_loop().time())

    @property
    def _has_begun(self) -> bool:
        return self._has_tokens or self._progress.has_begun

    @property
    def _other_is_ready(self) -> bool:
        """Return whether there is a ready server at which no attempt has failed since the latest token came."""
        return self._fleet.has_other(*self._failed, *self._unfit)

    async def events(
        self, attempt: Callable[[Replica], AsyncGenerator[TextEvent, None]], prefix: str
    ) -> AsyncGenerator[TextEvent, None]:
        """Yield all events of the answer; if a server is lost, another one continues it.

        Args:
            attempt: function that requests the rest of the answer from one server, and yields its events.
            prefix: hash of the prompt's beginning; a server that got an equal one before is preferred.

        Raises:
            SpecDecError: a server refuses the request, no server can continue it, or its time is over.
        """
        while self._progress.reason is None:
            try:
                with self._leased(prefix) as replica:
                    async with aclosing(attempt(replica)) as events:
                        async for event in events:
                            if isinstance(event, Commit) and event.token_ids:
                                self._progressed()
                                replica.num_tokens += len(event.token_ids)
                            if self._progress.take(event):
                                yield event
            except RESUMABLE as exc:
                if self._progress.reason is None:
                    self._progress.lost(exc)
                    await self._pause(exc)
        yield Finished(self._progress.reason)

    @contextmanager
    def _leased(self, prefix: str) -> Generator[Replica, None, None]:
        """Yield the server for the next attempt, and count the request there until the block ends.

        Args:
            prefix: hash of the prompt's beginning, as in `events`.

        Raises:
            SpecDecError: the block failed, or no server can take the request. The error is of a class in `RESUMABLE`
                if another attempt may succeed.
        """
        replica: Replica | None = None
        self._latest = None
        try:
            with self._fleet.lease(prefix=prefix, failed=self._failed, unfit=self._unfit) as replica:
                self._latest = replica
                yield replica
        except RequestError as exc:  # this server refuses: other model, shorter context, no access
            if replica is None or not (self._progress.has_begun or isinstance(exc, REFUSES_US)):
                raise
            self._exclude(replica, exc)
            raise UnavailableError(exc.message, address=exc.address) from exc
        except RESUMABLE:
            if replica is not None:
                self._failed.add(replica.address)
            raise

    def _progressed(self) -> None:
        """Record that a token has arrived: earlier failures no longer count against the request or its servers."""
        self._has_tokens = True
        if self._lost_at is not None:
            logger.info("a request goes on after %.1f s", time.monotonic() - self._lost_at)
            self._fleet.budget.give_back()
            self._lost_at = None
        self._num_dials = self._num_barren = 0
        self._failed.clear()

    async def _pause(self, exc: SpecDecError) -> None:
        """Wait before the next attempt, after one has failed with the error `exc`.

        The wait is random and grows with each attempt; if another server is ready, it lasts only until the retry budget
        allows an attempt.

        Raises:
            SpecDecError: no further attempt is made; this is the error that the client gets.
        """
        is_news = self._lost_at is None
        self._check_can_resume(exc)
        if is_news:
            how = "goes on at another one" if self._other_is_ready else f"tried again for up to {self._patience_s:g} s"
            logger.info("lost the server of a request (%s); %s", exc, how)
        if not self._other_is_ready:  # wait a random time, in addition to the time that a full server asks for
            await self._check_trust(exc)
            asked_s = min(exc.retry_after_s, MAX_REDIAL_S) if isinstance(exc, CapacityError) else 0.0
            await asyncio.sleep(asked_s + random.uniform(0.0, min(MAX_REDIAL_S, REDIAL_S * 2**self._num_dials)))
            self._num_dials += 1
        refused = isinstance(exc, CapacityError) and not self._has_begun
        while not self._fleet.budget.take(time.monotonic(), spare=SIZE / 2 if refused else 0.0):
            if refused and self._lost_at is not None and time.monotonic() - self._lost_at > MAX_REDIAL_S:
                raise exc  # all servers are full: the client gets their refusal
            self._check_patience(exc)
            await asyncio.sleep(random.uniform(0.0, 4 * REDIAL_S))

    def _check_can_resume(self, exc: SpecDecError) -> None:
        """Record that an attempt has failed with the error `exc`, and decide whether to make another one.

        Raises:
            SpecDecError: no other attempt is made; this is the error that the client gets.
        """
        if isinstance(exc, DeadlineError) and not self.left_s:
            raise exc
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        is_full = isinstance(exc, CapacityError)
        self._num_barren += isinstance(exc, InternalError) or (self._progress.answered and not is_full)
        if exc.is_final:
            raise exc
        if self._num_barren >= MAX_BARREN_RESUMES:
            last = _last(exc)
            last.is_final = True  # or this server's client would resume too, and perhaps break more servers
            raise last
        if self._other_is_ready:
            return
        # A full server refuses a new request. A resume waits for a slot, which its own lost stream may still hold.
        if not self._has_begun and (is_full or not (self._waits_to_begin or self._fleet.has_served_lately)):
            raise exc
        self._check_patience(exc)

    async def _check_trust(self, exc: SpecDecError) -> None:
        """Exclude the latest server if it can be reached but its certificate cannot be trusted.

        Raises:
            HandshakeError: the certificate cannot be trusted, and no other server is left.
        """
        if self._latest is None or not isinstance(exc, UnavailableError):
            return
        try:
            await check_link(self._latest.address, self._latest.security)
        except HandshakeError as fault:
            self._exclude(self._latest, fault)

    def _exclude(self, replica: Replica, exc: SpecDecError) -> None:
        """Make no further attempt at the server `replica`; raise `exc` if no other server is left."""
        self._unfit.add(replica.address)
        if self._unfit.issuperset(self._fleet.addresses):
            raise exc

    def _check_patience(self, exc: SpecDecError) -> None:
        """Check how long the request has been without a server.

        Raises:
            SpecDecError: longer than the settings allow; this is the error for the client, made from `exc`.
        """
        if self._lost_at is not None and time.monotonic() - self._lost_at > self._patience_s:
            raise _last(exc, f"; no server went on within {self._patience_s:g} s")


def _last(exc: SpecDecError, note: str = "") -> SpecDecError:
    """Return the error for the client of a request whose attempts failed: `exc` if it is an InternalError.

    Any other becomes an UnavailableError, with `note` behind its message.
    """
    return exc if isinstance(exc, InternalError) else UnavailableError(exc.message + note, address=exc.address)
