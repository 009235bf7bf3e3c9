"""The draft worker: drafts here, verifies at a remote target.

Serves `Generator`, so that the command line and GenerationService cannot tell it from a target. This file is the
synchronous schedule: draft gamma tokens, send them, wait for the verdict.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.config import DraftConfig
from inference.engine.drafting import DraftEngine, DraftSession
from inference.types import Commit, GenerationRequest
from inference.workers.verifier import VerifyStream, verify_stream
from inference.workers.vocabulary import Vocabulary


class DraftWorker:
    """Generates with a local draft and a remote target.

    Args:
        engine: drafts for all requests together.
        stub: of the target.
        config: the target's address, and the speculation length of requests that ask for none.
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
        draft = self._engine.open(request.prompt_token_ids, request.sampling)
        try:
            await draft.admitted()  # a session at the target without a draft would hold a slot in vain
            async with verify_stream(
                self._stub, self._config.target_address, deadline_s=self._config.deadline_s
            ) as target:
                await target.open(request, self._vocabulary)
                finish_reason = None
                while finish_reason is None:
                    commit = await self._round(request, draft, target)
                    finish_reason = commit.finish_reason
                    yield commit
        finally:
            self._engine.close(draft)

    async def _round(self, request: GenerationRequest, draft: DraftSession, target: VerifyStream) -> Commit:
        """Draft, send, wait: one commit."""
        started = time.monotonic()
        chain = await self._engine.propose(draft, self._num_wanted(request, draft))
        drafted = time.monotonic()
        await target.propose(len(draft.committed), chain)
        commit = await target.commit()
        wait_us = _us(time.monotonic() - drafted)
        draft.commit(commit.token_ids)
        network_us = max(0, wait_us - commit.timings.queue_us - commit.timings.compute_us)
        timings = replace(commit.timings, draft_us=_us(drafted - started), network_us=network_us)
        return replace(commit, timings=timings)

    def _num_wanted(self, request: GenerationRequest, draft: DraftSession) -> int:
        """Draft tokens worth sending: the pass adds one of the target's own, and the last token needs no successor."""
        num_output_tokens = len(draft.committed) - len(request.prompt_token_ids)
        gamma = self._config.gamma if request.gamma is None else request.gamma
        return min(gamma, request.max_new_tokens - num_output_tokens - 1)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
