"""The draft engine's loop: rounds, commits that agree with the drafted tokens (the chain) or not, and full contexts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from specdec.inference.engine.draft import DraftEngine
from specdec.inference.errors import CapacityError, UnavailableError
from specdec.inference.request import SamplingParams
from specdec.inference.scheduling.pacing import Pacing
from specdec.inference.serving.assembly import running
from tests.support.scripted import ScriptedProposer, token_at, tokens_at

GREEDY = SamplingParams()


@pytest.fixture
def proposer() -> ScriptedProposer:
    return ScriptedProposer()


@pytest.fixture
async def engine(proposer: ScriptedProposer) -> AsyncGenerator[DraftEngine, None]:
    async with running(DraftEngine(proposer, max_waiting=1)) as engine:
        yield engine
        proposer.gate.open()


async def at_gate(proposer: ScriptedProposer) -> None:
    await asyncio.to_thread(proposer.gate.wait_until_reached)


async def test_no_tokens_are_no_work(engine: DraftEngine, proposer: ScriptedProposer) -> None:
    session = engine.open([1, 2, 3], GREEDY)
    assert await engine.propose(session, 0) == ()
    assert proposer.steps == []


@pytest.mark.parametrize(
    ("committed", "left"),
    [(tokens_at(3, 2), tokens_at(5, 3)), ([token_at(3), 7], [])],
    ids=["it agrees and keeps the rest", "it disagrees and drops the chain"],
)
async def test_a_round_goes_on_after_a_commit(engine: DraftEngine, committed: list[int], left: list[int]) -> None:
    session = engine.open([1, 2, 3], GREEDY)
    assert list(await engine.propose(session, 5)) == tokens_at(3, 5)
    session.commit(committed)
    assert session.chain == left
    assert session.committed == [1, 2, 3, *committed]
    assert list(await engine.propose(session, 4)) == tokens_at(5, 4)


@pytest.mark.parametrize(
    ("committed", "lengths"),
    [([7], [3, 4, 5, 4, 5, 6, 7]), (tokens_at(3, 1), [3, 4, 5, 6, 7])],
    ids=["lost", "lives on"],
)
async def test_a_running_step_counts_if_its_chain_lives(
    engine: DraftEngine, proposer: ScriptedProposer, committed: list[int], lengths: list[int]
) -> None:
    """The token of a running step counts only if a commit meanwhile agrees with the drafted tokens before it.

    `committed` is committed during the third step; `lengths` are those of the sequences that all steps extended.
    """
    session = engine.open([1, 2, 3], GREEDY)
    await engine.propose(session, 2)
    proposer.gate.close()
    engine.pace(session, Pacing(window=4))
    await at_gate(proposer)
    session.commit(committed)
    proposer.gate.open()
    assert await session.drafted() == tokens_at(4, 4)
    assert [len(draft.token_ids) for step in proposer.steps for draft in step] == lengths


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_round_ends_with_what_it_has_once_its_session_is_held(
    engine: DraftEngine, proposer: ScriptedProposer, num_tokens: int
) -> None:
    """A round of drafting ends, with the tokens it has, if drafting is switched off before its next step.

    Regression: the round never ended, and its session got no more draft tokens.
    """
    session = engine.open([1, 2, 3], GREEDY)
    await engine.propose(session, num_tokens)
    chain = asyncio.create_task(engine.propose(session, 4))
    await asyncio.sleep(0)  # it waits for tokens, and its step has not begun
    engine.pace(session, Pacing())
    async with asyncio.timeout(10):
        assert list(await chain) == tokens_at(3, num_tokens)
        assert list(await engine.propose(session, 4)) == tokens_at(3, 4)


async def test_commits_of_held_sessions_do_not_wake_the_loop(
    engine: DraftEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit does not wake the draft engine's loop for a session whose drafting is switched off.

    Regression: each commit of such a session made the loop look at all sessions, on the target's own core.
    """
    wakes: list[int] = []
    held, drafting = (engine.open([1, 2, 3], GREEDY) for _ in range(2))
    await engine.propose(drafting, 1)
    monkeypatch.setattr(engine, "wake", lambda: wakes.append(1))
    for session, pacing in ((held, Pacing()), (drafting, Pacing(window=1))):
        engine.pace(session, pacing)
        engine.commit(session, [token_at(3)])
        assert len(wakes) == 2 * pacing.window


async def test_ends_where_the_drafts_context_is_full(engine: DraftEngine) -> None:
    """Drafting ends where the draft's context is full; the target then continues alone.

    A chain whose sequence has 40 tokens can be extended once, and a longer one not at all.
    """
    session = engine.open(list(range(39)), GREEDY)
    assert list(await engine.propose(session, 8)) == tokens_at(39, 2)
    session.commit([*tokens_at(39, 2), 5])
    assert await engine.propose(session, 8) == ()
    assert await engine.propose(engine.open(list(range(100)), GREEDY), 8) == (), "a prompt beyond the context"


async def test_queue_and_slots(engine: DraftEngine) -> None:
    first, second, third = (engine.open([1], GREEDY) for _ in range(3))
    await engine.propose(second, 1)
    with pytest.raises(CapacityError, match="2 slots"):
        engine.open([1], GREEDY)
    engine.close(first)
    async with asyncio.timeout(60):
        await engine.propose(third, 1)


async def test_stop_fails_waiting_sessions(engine: DraftEngine) -> None:
    sessions = [engine.open([1], GREEDY) for _ in range(3)]
    waiting = asyncio.create_task(engine.propose(sessions[2], 1))
    await engine.propose(sessions[0], 1)
    await engine.stop()
    with pytest.raises(UnavailableError):
        await waiting
