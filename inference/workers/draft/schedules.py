"""Schedules of a draft worker: synchronous rounds, and running ahead.

A round drafts gamma tokens, sends them and waits for the verdict. A draft that runs ahead never waits: while the target
verifies, the draft extends its chain, up to a window past the last commit, and sends tokens soon after they are made. A
commit that agrees with the chain shortens it; any other commit begins a new chain. The target verifies the draft tokens
that have arrived, and decodes by itself if there are none, so it does not wait for a slow draft. If the round trip is
long, the draft also sends branches: if the target's token begins a branch, the next tokens are at the target already.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from inference.commit import Commit, Counts
from inference.engine.draft import DraftEngine
from inference.engine.draft_session import DraftSession
from inference.errors import UnavailableError
from inference.request import GenerationRequest
from inference.scheduling.link import Link
from inference.scheduling.pacing import Measured, Pacing, choose_pacing
from inference.workers.draft.verify_stream import VerifyStream

PROBE_AFTER = 16
"""Commits in a row that report no draft tokens received; then the draft sends some, to measure the round trip."""


async def rounds(
    request: GenerationRequest, engine: DraftEngine, draft: DraftSession, target: VerifyStream, *, gamma: int
) -> AsyncGenerator[Commit, None]:
    """Yield the commits of an opened session to the last one, each after a round of drafts."""
    end = len(draft.committed) + request.max_new_tokens
    finish_reason = None
    while finish_reason is None:
        # The pass itself adds one token after the accepted ones.
        num_tokens = min(gamma, end - len(draft.committed) - 1)
        started = time.monotonic()
        chain = await engine.propose(draft, num_tokens)
        drafted = time.monotonic()
        await target.proposals.propose(len(draft.committed), chain)
        commit = await target.commit()
        received = time.monotonic()
        engine.commit(draft, commit.token_ids)
        finish_reason = commit.finish_reason
        yield target.with_figures(commit, wait_s=received - drafted, draft_s=drafted - started)


async def run_ahead(
    engine: DraftEngine, draft: DraftSession, target: VerifyStream, *, gamma: int
) -> AsyncGenerator[Commit, None]:
    """Yield the commits of an opened session to the last one; gamma 0 sends no drafts."""
    runner = Runner(engine, draft, target.proposals.link, gamma=gamma)
    sender = asyncio.create_task(target.proposals.run(draft))
    try:
        before, commit = time.monotonic(), await target.commit()
        while True:
            now = time.monotonic()
            yield target.with_figures(commit, wait_s=now - before, counts=runner.commit(commit))
            if commit.finish_reason is not None:
                return
            if isinstance(draft.error, UnavailableError):  # this server shuts down; on other errors the target goes on
                raise draft.error
            before, commit = now, await target.commit()
    finally:
        runner.stop()
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


class Runner:
    """Controller of how far and how broadly one session runs ahead, from measured times.

    Args:
        engine, draft: engine and session that it controls.
        link: times of the link to the session's target.
        gamma: most draft tokens of one pass; 0 means no drafts.
    """

    def __init__(self, engine: DraftEngine, draft: DraftSession, link: Link, *, gamma: int) -> None:
        self._engine = engine
        self._draft = draft
        self._link = link
        self._gamma = gamma
        self._num_unanswered = PROBE_AFTER  # measure at once: the opening took longer than a round trip
        self._pace()

    def commit(self, commit: Commit, *, num_known: int = 0) -> Counts:
        """Apply a commit except its first `num_known` tokens, which the draft has already; return the counts for it."""
        draft = self._draft
        num_hits, num_wasted = draft.num_branch_hits, draft.num_wasted_tokens
        self._engine.commit(draft, commit.token_ids[num_known:])
        self._link.record_pass(commit.timings.compute_us / 1e6)
        self._num_unanswered = 0 if commit.num_received_tokens else self._num_unanswered + 1
        self._pace()
        return Counts(
            num_branch_hits=draft.num_branch_hits - num_hits,
            num_wasted_tokens=draft.num_wasted_tokens - num_wasted,
            window=draft.pacing.window,
            max_branches=draft.pacing.branching.count,
        )

    def stop(self) -> None:
        """Stop drafting for this session."""
        self._engine.pace(self._draft, Pacing())

    def _pace(self) -> None:
        measured = Measured(self._engine.step_s, self._link.pass_s, self._link.round_trip_s)
        pacing = choose_pacing(self._gamma, self._engine.num_branches, measured)
        if self._num_unanswered >= PROBE_AFTER:
            pacing = replace(pacing, num_ahead=0, min_gain=0.0)
        self._engine.pace(self._draft, pacing)
