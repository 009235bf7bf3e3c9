"""The synchronous schedule: draft gamma tokens, send them, wait for the verdict."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from inference.commit import Commit
from inference.engine.draft import DraftEngine
from inference.engine.draft_session import DraftSession
from inference.request import GenerationRequest
from inference.workers.draft.verify_stream import VerifyStream


async def rounds(
    request: GenerationRequest, engine: DraftEngine, draft: DraftSession, target: VerifyStream, *, gamma: int
) -> AsyncGenerator[Commit, None]:
    """Commits of an opened session to the last one."""
    end = len(draft.committed) + request.max_new_tokens
    finish_reason = None
    while finish_reason is None:
        # The pass adds a token of the target's own, and the last token needs no successor.
        commit = await _round(engine, draft, target, min(gamma, end - len(draft.committed) - 1))
        finish_reason = commit.finish_reason
        yield commit


async def _round(engine: DraftEngine, draft: DraftSession, target: VerifyStream, num_tokens: int) -> Commit:
    started = time.monotonic()
    chain = await engine.propose(draft, num_tokens)
    drafted = time.monotonic()
    await target.proposals.propose(len(draft.committed), chain)
    commit = await target.commit()
    received = time.monotonic()
    engine.commit(draft, commit.token_ids)
    return target.with_figures(commit, wait_s=received - drafted, draft_s=drafted - started)
