"""Whether, when and how often one request asks again behind its committed tokens."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from inference.config import DraftConfig
from inference.errors import CapacityError, DeadlineError, InternalError, SpecDecError, UnavailableError
from inference.scheduling.retry_budget import RetryBudget
from inference.workers.draft.verify_stream import Origin
from inference.workers.remote import MAX_DEADLINE_S

logger = logging.getLogger(__name__)

REDIAL_S = 0.25
MAX_REDIAL_S = 2.0
"""Waits before dialling again are drawn from 0 to this, doubling from `REDIAL_S`: a fleet must not dial in step."""
MAX_BARREN_RESUMES = 3
"""Streams in a row that were opened and broke without a token: the request may be what breaks the target."""

RESUMABLE = (UnavailableError, CapacityError, InternalError, DeadlineError)


class Resuming:
    """One request's attempts.

    Args:
        origin: of its tokens.
        budget: of the process.
        config: how long a request may take, and be without a target.
    """

    def __init__(self, origin: Origin, budget: RetryBudget, config: DraftConfig) -> None:
        self._origin = origin
        self._budget = budget
        self._patience_s = config.reconnect_timeout_s
        self._ends_at = time.monotonic() + min(config.connection.deadline_s, MAX_DEADLINE_S)
        self._lost_at: float | None = None
        self._num_dials = self._num_barren = 0

    @property
    def left_s(self) -> float:
        """Seconds until the request's deadline."""
        return max(0.0, self._ends_at - time.monotonic())

    def progressed(self) -> None:
        """A commit has come."""
        if self._lost_at is not None:
            logger.info("the target is back after %.1f s", time.monotonic() - self._lost_at)
            self._budget.give_back()
            self._lost_at = None
        self._num_dials = self._num_barren = 0

    def failed(self, exc: SpecDecError, *, has_tokens: bool) -> None:
        """A stream has ended too early, one of RESUMABLE; `has_tokens` have been committed before.

        Raises:
            SpecDecError: there is no sense in another one.
        """
        # A full target refuses a new request, but a resume waits for its place, which its own lost session may hold.
        is_refused = isinstance(exc, CapacityError) and not (has_tokens or self._origin.has_begun)
        if is_refused or (isinstance(exc, DeadlineError) and not self.left_s):
            raise exc
        if self._lost_at is None:  # once, not at every attempt
            self._lost_at = time.monotonic()
            logger.info("lost the target, dialling again: %s", exc)
        self._origin.is_cautious = not self._origin.answered
        self._num_barren += self._origin.answered or isinstance(exc, InternalError)
        if self._num_barren >= MAX_BARREN_RESUMES:
            raise _last(exc)
        self._check_patience(exc)

    async def pause(self, exc: SpecDecError) -> None:
        """Wait before the next stream: a time drawn at random, behind what a full target asks for, and for its turn.

        Raises:
            SpecDecError: it has taken too long.
        """
        asked_s = min(exc.retry_after_s, MAX_REDIAL_S) if isinstance(exc, CapacityError) else 0.0
        await asyncio.sleep(asked_s + random.uniform(0.0, min(MAX_REDIAL_S, REDIAL_S * 2**self._num_dials)))
        while not self._budget.take(time.monotonic()):
            self._check_patience(exc)
            await asyncio.sleep(random.uniform(0.0, 4 * REDIAL_S))
        self._num_dials += 1

    def _check_patience(self, exc: SpecDecError) -> None:
        if self._lost_at is not None and time.monotonic() - self._lost_at > self._patience_s:
            raise _last(exc)


def _last(exc: SpecDecError) -> SpecDecError:
    """What the client is told in the end: a fault stays one, all else is a target that is not there."""
    return exc if isinstance(exc, InternalError) else UnavailableError(exc.message, address=exc.address)
