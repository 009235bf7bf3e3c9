"""Portions in which a growing chain is sent: no message costs more than it saves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from specdec.inference.engine.draft_session import DraftedSequence, DraftSession
from specdec.inference.model.proposer import DraftToken
from specdec.inference.scheduling.acceptance import Confidence
from specdec.inference.scheduling.pacing import Pacing

SURE, UNSURE = 20.0, 0.05


class Blind(Confidence):
    """Confidence that learns nothing: tokens with the margin `SURE` count as accepted, others as rejected."""

    def rate(self, token: DraftToken) -> float:
        return 1.0 if token.margin == SURE else 0.1

    def record(self, token: DraftToken, *, accepted: bool) -> None:
        pass


def session(pacing: Pacing) -> DraftSession:
    found = DraftSession(DraftedSequence([7]), confidence=Blind())
    found.enter(0)
    found.pacing = pacing
    return found


def draft(session: DraftSession, *margins: float) -> None:
    """Extend the chain by tokens with these margins, as far as the session wants."""
    for margin in margins:
        for path in session.growing(1000):
            session.extend(path, [DraftToken(10 + len(path.tokens), 5, margin)])


async def is_time_to_send(session: DraftSession) -> bool:
    try:
        await asyncio.wait_for(session.has_unsent(), timeout=0.001)
    except TimeoutError:
        return False
    return True


async def test_a_growing_chain_goes_out_in_chunks() -> None:
    it = session(Pacing(window=8, chunk=3))
    draft(it, SURE, SURE)
    assert not await is_time_to_send(it)
    draft(it, SURE)
    assert await is_time_to_send(it)
    assert [growth.token_ids for growth in it.take_unsent(0)] == [[10, 11, 12]]
    draft(it, SURE)
    assert not await is_time_to_send(it)
    it.pacing = replace(it.pacing, window=5)
    draft(it, SURE)
    assert await is_time_to_send(it), "the end of the window sends what is left"


async def test_a_doubtful_token_ends_the_first_message() -> None:
    """A doubtful token ends the first message of a proposal.

    Tokens after it are worth less than the time for which the target waits for them.
    """
    it = session(Pacing(window=8, chunk=8, step_s=0.001, round_s=0.01))
    draft(it, SURE)
    assert not await is_time_to_send(it)
    draft(it, UNSURE)
    assert await is_time_to_send(it)


async def test_hopeless_tokens_are_not_sent() -> None:
    it = session(Pacing(window=8, chunk=1, min_gain=0.2))
    draft(it, UNSURE)
    assert not await is_time_to_send(it)
    it.pacing = replace(it.pacing, min_gain=0.05)
    assert await is_time_to_send(it)


async def test_tokens_decoded_meanwhile_are_no_gain() -> None:
    it = session(Pacing(window=8, chunk=1, min_gain=0.1, num_ahead=3))
    draft(it, SURE, SURE, SURE)
    assert not await is_time_to_send(it)
    draft(it, SURE)
    assert await is_time_to_send(it)


async def test_a_chain_that_is_likely_wrong_is_not_extended() -> None:
    it = session(Pacing(window=8, chunk=1, min_survival=0.05))
    draft(it, UNSURE, SURE, UNSURE, SURE, SURE)
    assert len(it.chain) == 3  # 0.1, 0.1, 0.01
    it.commit([10, 11])
    draft(it, SURE)
    assert len(it.chain) == 2  # what is agreed is no longer a doubt
