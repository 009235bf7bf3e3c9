"""Draft worker, which drafts in this process while a remote target verifies.

It is a `Generator`, so that the command line and GenerationService use it like a target. It owns the link to the
target. If the link breaks, the worker dials again and resumes, and the tokens do not change.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from inference.commit import Answer
from inference.config import DraftConfig
from inference.engine.draft import DraftEngine
from inference.engine.draft_session import DraftSession
from inference.engine.target import check_token_ids
from inference.request import GenerationRequest, Schedule
from inference.text.vocabulary import Vocabulary
from inference.workers.draft.schedules import rounds, run_ahead
from inference.workers.draft.verify_stream import StreamState, verify_stream
from inference.workers.failover import prefix_of
from inference.workers.fleet import Fleet, Replica
from inference.workers.resuming import Resuming


class DraftWorker:
    """Generator with a local draft and a remote target.

    Args:
        engine: draft engine of all requests together.
        fleet: fleet of targets.
        config: limits of a connection, and schedule and gamma of requests that set none.
        vocabulary: vocabulary of the draft.
        max_length: context of the draft in tokens; the target's own limit decides which requests are refused.

    Attributes:
        vocab_size: size of the target's vocabulary, set from its card; the draft's while there is none.
    """

    def __init__(
        self, engine: DraftEngine, fleet: Fleet, *, config: DraftConfig, vocabulary: Vocabulary, max_length: int
    ) -> None:
        self._engine = engine
        self._fleet = fleet
        self._config = config
        self._vocabulary = vocabulary
        self.max_length, self.vocab_size = max_length, vocabulary.size

    @property
    def vocabulary_share(self) -> float:
        """Return the share of the target's ids that the draft can propose."""
        return self._vocabulary.share_of(self.vocab_size)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Answer, None]:
        """See `Generator`."""
        check_token_ids(request.prompt_token_ids, vocab_size=self.vocab_size)
        draft = self._engine.open(
            request.prompt_token_ids,
            request.sampling,
            output_start=request.output_start,
            grammar=await self._engine.compiled(request.grammar),
            cache_salt=request.cache_salt,
            vocab_size=self.vocab_size,
        )
        progress = StreamState(request.provenance, draft)
        resuming = Resuming(progress, self._fleet, self._config.connection, waits_to_begin=True)

        def attempt(replica: Replica) -> AsyncGenerator[Answer, None]:
            draft.forget_sent()  # the target of a new stream knows none of the chain
            rest = request.resumed(draft.committed[len(request.prompt_token_ids) :])
            return self._stream(rest, draft, progress, replica, deadline_s=resuming.left_s)

        try:
            await draft.admitted()  # a session without a draft would waste a slot of the target
            async with aclosing(resuming.events(attempt, prefix_of(request.prompt_token_ids))) as events:
                async for event in events:
                    yield event
        finally:
            self._engine.close(draft)

    async def _stream(
        self,
        request: GenerationRequest,
        draft: DraftSession,
        state: StreamState,
        replica: Replica,
        *,
        deadline_s: float,
    ) -> AsyncGenerator[Answer, None]:
        """Yield Opened and the commits of one stream; it ends early, at a commit, if the draft loses its slot."""
        gamma = self._config.gamma if request.gamma is None else request.gamma
        schedule = request.schedule or self._config.schedule
        if gamma == 0:
            schedule = Schedule.ASYNC  # without drafts, rounds would cost a round trip a token
        opening = replace(request, gamma=gamma, schedule=schedule)
        can_move = self._fleet.has_other(replica.address)
        async with verify_stream(replica, state, deadline_s=deadline_s, can_move=can_move) as target:
            await target.open(opening, replace(self._vocabulary, size=self.vocab_size))
            if schedule.target_waits:
                commits = rounds(opening, self._engine, draft, target, gamma=gamma)
            else:
                commits = run_ahead(self._engine, draft, target, gamma=gamma)
            opened = None
            async with aclosing(commits):
                async for commit in commits:
                    if opened is None and (opened := target.opened) is not None:
                        yield opened
                    yield commit
                    if draft.is_waiting:
                        break
        if not state.has_ended:
            await draft.admitted()  # it has yielded its slot, and so does the target's session
