"""The draft worker: drafts here, verifies at a remote target.

Serves `Generator`, so that the command line and GenerationService cannot tell it from a target. Owns the link: when it
breaks, the worker dials again and resumes, and the tokens do not change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.commit import Commit
from inference.config import DraftConfig
from inference.engine.draft import DraftEngine
from inference.engine.draft_session import DraftSession
from inference.engine.target import check_token_ids
from inference.errors import CapacityError, UnavailableError
from inference.request import GenerationRequest, Schedule
from inference.text.vocabulary import Vocabulary
from inference.workers.draft.rounds import rounds
from inference.workers.draft.run_ahead import run_ahead
from inference.workers.draft.verify_stream import Origin, verify_stream

logger = logging.getLogger(__name__)

REDIAL_S = 0.25


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
        origin = Origin()
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
                        yield commit
                return
            except (UnavailableError, CapacityError) as exc:
                # 3. Lost: dial again, until it has taken too long. A target that is full refuses a new request, but a
                # resume waits for its place, which its own lost session may still hold.
                if isinstance(exc, CapacityError) and lost_at is None:
                    raise
                if lost_at is None:  # once, not at every attempt
                    lost_at = time.monotonic()
                    logger.info("lost the target, dialling again: %s", exc)
                if time.monotonic() - lost_at > self._config.reconnect_timeout_s:
                    raise UnavailableError(exc.message, address=exc.address) from exc
                await asyncio.sleep(REDIAL_S)

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
