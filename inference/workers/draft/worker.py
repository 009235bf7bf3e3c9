"""The draft worker: drafts here, verifies at a remote target.

Serves `Generator`, so that the command line and GenerationService cannot tell it from a target. Owns the link: when it
breaks, the worker dials again and resumes, and the tokens do not change.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.commit import Commit
from inference.config import DraftConfig
from inference.engine.draft import DraftEngine
from inference.engine.draft_session import DraftSession
from inference.engine.loop import SHUTTING_DOWN
from inference.engine.target import check_token_ids
from inference.errors import CapacityError, InternalError, UnavailableError
from inference.request import GenerationRequest, Schedule
from inference.text.vocabulary import Vocabulary
from inference.workers.draft.rounds import rounds
from inference.workers.draft.run_ahead import run_ahead
from inference.workers.draft.verify_stream import Origin, verify_stream

logger = logging.getLogger(__name__)

REDIAL_S = 0.25
MAX_REDIAL_S = 2.0
"""Waits before dialling again are drawn from 0 to this, doubling from `REDIAL_S`: a fleet must not dial in step."""
MAX_BARREN_RESUMES = 3
"""Streams in a row that were opened and broke without a token: the request may be what breaks the target."""


class DraftWorker:
    """Generates with a local draft and a remote target.

    Args:
        engine: drafts for all requests together.
        stub: of the target.
        config: the target's address; schedule and speculation length of requests that ask for none.
        vocabulary: of the draft.
        max_length: of the draft; the target's own limit decides where a request is refused.
    """

    def __init__(
        self,
        engine: DraftEngine,
        stub: rpc.VerificationServiceStub,
        *,
        config: DraftConfig,
        vocabulary: Vocabulary,
        max_length: int,
    ) -> None:
        self._engine = engine
        self._stub = stub
        self._config = config
        self._vocabulary = vocabulary
        self._max_length = max_length

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
        """See `Generator`."""
        check_token_ids(request.prompt_token_ids, vocab_size=self._vocabulary.size)
        draft = self._engine.open(
            request.prompt_token_ids,
            request.sampling,
            output_start=request.output_start,
            grammar=await self._engine.compiled(request.grammar),
        )
        try:
            await draft.admitted()  # a session at the target without a draft would hold a slot in vain
            async with aclosing(self._commits(request, draft)) as commits:
                async for commit in commits:
                    yield commit
        finally:
            self._engine.close(draft)

    async def _commits(self, request: GenerationRequest, draft: DraftSession) -> AsyncGenerator[Commit, None]:
        """Commits to the last one, over as many streams as it takes."""
        lost_at: float | None = None
        origin, num_dials, num_barren = Origin.of(request.provenance), 0, 0
        while True:
            # 1. Ask for what is not committed yet; the target of a new stream knows none of the chain.
            draft.forget_sent()
            rest = request.resumed(draft.committed[len(request.prompt_token_ids) :])
            try:
                # 2. Pass on commits, to the last one or for as long as the link holds.
                async with aclosing(self._stream(rest, draft, origin)) as commits:
                    async for commit in commits:
                        if lost_at is not None:
                            logger.info("the target is back after %.1f s", time.monotonic() - lost_at)
                            lost_at = None
                        num_dials = num_barren = 0
                        yield commit
                return
            except (UnavailableError, CapacityError, InternalError) as exc:
                # 3. Lost: dial again, until it has taken too long. A target that is full refuses a new request, but a
                # resume waits for its place, which its own lost session may still hold.
                rest_begun = origin.has_begun or len(draft.committed) > len(request.prompt_token_ids)
                if isinstance(exc, CapacityError) and not rest_begun:
                    raise
                if lost_at is None:  # once, not at every attempt
                    lost_at = time.monotonic()
                    logger.info("lost the target, dialling again: %s", exc)
                origin.is_cautious = not origin.answered
                num_barren += origin.answered or isinstance(exc, InternalError)
                if num_barren >= MAX_BARREN_RESUMES or time.monotonic() - lost_at > self._config.reconnect_timeout_s:
                    if isinstance(exc, InternalError):
                        raise
                    raise UnavailableError(exc.message, address=exc.address) from exc
                self._require_serving(draft)
                await asyncio.sleep(_pause_s(num_dials, exc))
                num_dials += 1

    def _require_serving(self, draft: DraftSession) -> None:
        """A draft session that was closed is this server's own end, not the target's.

        Raises:
            UnavailableError: the server is shutting down.
        """
        if draft.slot is None:
            raise UnavailableError(SHUTTING_DOWN)

    async def _stream(
        self, request: GenerationRequest, draft: DraftSession, origin: Origin
    ) -> AsyncGenerator[Commit, None]:
        """Commits of one stream."""
        gamma = self._config.gamma if request.gamma is None else request.gamma
        schedule = request.schedule or self._config.schedule
        if gamma == 0:
            schedule = Schedule.ASYNC  # without drafts, rounds would cost a round trip a token
        opening = replace(request, gamma=gamma, schedule=schedule)
        link = self._config.connection
        async with verify_stream(self._stub, link.address, origin, deadline_s=link.deadline_s) as target:
            await target.open(opening, self._vocabulary)
            if schedule.target_waits:
                commits = rounds(opening, self._engine, draft, target, gamma=gamma)
            else:
                commits = run_ahead(self._engine, draft, target, gamma=gamma)
            async with aclosing(commits):
                async for commit in commits:
                    yield commit


def _pause_s(num_dials: int, exc: Exception) -> float:
    """Seconds before the next dial: drawn at random, behind what a full target asks for."""
    asked_s = min(exc.retry_after_s, MAX_REDIAL_S) if isinstance(exc, CapacityError) else 0.0
    return asked_s + random.uniform(0.0, min(MAX_REDIAL_S, REDIAL_S * 2**num_dials))
