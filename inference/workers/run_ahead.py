"""The asynchronous schedule: the draft never waits.

While the target verifies, the draft goes on extending its chain, up to a window past the last commit, and sends every
token as it comes. A commit that agrees with the chain shortens it; one that does not starts it anew. The target
verifies what has arrived, and decodes by itself if nothing has, so the draft can only help. Where a round trip is long,
branches go along: if the target leaves the chain for one of them, it need not wait to be told how that goes on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from inference.engine.draft_session import DraftSession
from inference.engine.drafting import DraftEngine
from inference.speculation.controller import choose_branching
from inference.types import MAX_GAMMA, Commit
from inference.workers.proposals import ProposalSender
from inference.workers.verifier import VerifyStream


async def run_ahead(
    engine: DraftEngine, draft: DraftSession, target: VerifyStream, *, gamma: int, max_branches: int = 0
) -> AsyncGenerator[Commit, None]:
    """Commits of an opened session to the last one; gamma 0 leaves the target to itself."""
    pace = Pace(gamma, min(max_branches, engine.num_branches))
    sender = asyncio.create_task(send_drafts(draft, target.proposals))
    try:
        engine.run_ahead(draft, gamma)
        before, commit = time.monotonic(), await target.commit()
        while True:
            now = time.monotonic()
            yield _with_draft(_with_network(commit, now - before), *_advance(engine, draft, commit))
            if commit.finish_reason is not None:
                return
            pace.keep(engine, draft, pass_s=commit.timings.compute_us / 1e6, round_trip_s=target.round_trip_s)
            before, commit = now, await target.commit()
    finally:
        engine.run_ahead(draft, 0)
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


async def send_drafts(draft: DraftSession, target: ProposalSender) -> None:
    """Tell the target of every draft token. A lost link ends this quietly: whoever reads commits is told."""
    while True:
        await draft.has_unsent()
        await target.grow(draft)


@dataclass(frozen=True, slots=True)
class Pace:
    """How far and how broadly a draft runs ahead, as far as measurements do not say otherwise.

    Attributes:
        gamma: tokens of the chain at least; 0 means no drafts.
        max_branches: beside the chain at most.
    """

    gamma: int
    max_branches: int

    def keep(self, engine: DraftEngine, draft: DraftSession, *, pass_s: float, round_trip_s: float) -> None:
        """Adjust a session to what is known after a commit."""
        measured = {"step_s": engine.step_s, "pass_s": pass_s, "round_trip_s": round_trip_s}
        branching = choose_branching(self.max_branches if self.gamma else 0, **measured)
        engine.run_ahead(draft, window(self.gamma, **measured), branching)


def window(gamma: int, *, step_s: float, pass_s: float, round_trip_s: float) -> int:
    """How far to run ahead: tokens drafted while a pass, and the way there and back, go on; gamma 0 means none."""
    if not gamma or not step_s:
        return gamma
    return max(gamma, min(MAX_GAMMA, math.ceil((round_trip_s + 2 * pass_s) / step_s)))


def _advance(engine: DraftEngine, draft: DraftSession, commit: Commit) -> tuple[int, int]:
    """Tell a draft what is final; how many of its branches have come true, and how many of its tokens were in vain."""
    num_hits, num_wasted = draft.num_branch_hits, draft.num_wasted_tokens
    engine.commit(draft, commit.token_ids)
    return draft.num_branch_hits - num_hits, draft.num_wasted_tokens - num_wasted


def _with_draft(commit: Commit, num_hits: int, num_wasted: int) -> Commit:
    return replace(commit, timings=replace(commit.timings, num_branch_hits=num_hits, num_wasted_tokens=num_wasted))


def _with_network(commit: Commit, gap_s: float) -> Commit:
    """What the target did not spend of the time since the last commit, the way from there took."""
    timings = commit.timings
    network_us = max(0, round(gap_s * 1e6) - timings.queue_us - timings.compute_us)
    return replace(commit, timings=replace(timings, network_us=network_us))
