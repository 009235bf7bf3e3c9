"""The target engine's loop: slots, steps, and requests that finish, fail or are cancelled."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdec.inference.commit import Commit, FinishReason
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.engine.target_session import TargetSession
from specdec.inference.errors import InvalidRequestError, UnavailableError
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.tree import Branch
from tests.support.answers import commits_of, next_commit, tokens
from tests.support.scripted import ScriptedDecoder, token_at, tokens_at, until

MAX_LENGTH = 60


@pytest.fixture
def decoder() -> ScriptedDecoder:
    return ScriptedDecoder(num_slots=2, max_length=MAX_LENGTH)


@pytest.fixture
async def engine(decoder: ScriptedDecoder) -> AsyncGenerator[TargetEngine, None]:
    """Start an engine with two slots and a queue of two requests."""
    async with running(TargetEngine(decoder, EngineLimits(max_waiting=2))) as engine:
        yield engine
        decoder.gate.open()


def request(length: int = 3, *, max_new_tokens: int = 4, stop: int | None = None, **fields: Any) -> GenerationRequest:
    stop_token_ids = frozenset(() if stop is None else (stop,))
    return GenerationRequest(
        tuple(range(length)), max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, **fields
    )


def drafted(engine: TargetEngine, wanted: GenerationRequest) -> TargetSession:
    """Open a session that drafts in rounds, so that its passes wait for proposals."""
    session = engine.open(wanted)
    engine.begin_help(session, Schedule.SYNC)
    return session


async def finish(engine: TargetEngine, wanted: GenerationRequest) -> list[Commit]:
    return await commits_of(engine.generate(wanted))


async def at_gate(decoder: ScriptedDecoder) -> None:
    await asyncio.to_thread(decoder.gate.wait_until_reached)


async def until_counts(engine: TargetEngine, *, running: int, waiting: int = 0) -> None:
    await until(lambda: (engine.num_running, engine.num_waiting) == (running, waiting))


async def test_a_stop_token_in_the_prompt_is_no_stop(engine: TargetEngine) -> None:
    assert len(tokens(await finish(engine, request(3, stop=2)))) == 4


async def test_refuses_a_token_below_zero(engine: TargetEngine) -> None:
    with pytest.raises(InvalidRequestError, match="-1"):
        engine.open(GenerationRequest((-1,)))


async def test_cancelled_in_the_middle_of_a_pass(engine: TargetEngine, decoder: ScriptedDecoder) -> None:
    """A request that is cancelled during its pass, which cannot be interrupted, leaves nothing behind.

    The result of the pass is dropped, and the next request in the same slot gets nothing of it.
    """
    decoder.gate.close()
    given_up = asyncio.create_task(finish(engine, request(20)))
    await at_gate(decoder)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    following = [asyncio.create_task(finish(engine, request(length))) for length in (3, 6)]
    await asyncio.sleep(0)
    decoder.gate.open()
    assert [tokens(await task) for task in following] == [tokens_at(3, 4), tokens_at(6, 4)]
    assert decoder.steps[1][0].start == 0
    await until_counts(engine, running=0)


async def test_stop_fails_what_is_left_after_the_grace_period(engine: TargetEngine) -> None:
    """When its grace period is over, a stopping engine fails the sessions that are left.

    Here two sessions wait for a draft that never comes, and one for a slot.
    """
    sessions = [drafted(engine, request()) for _ in range(3)]
    await until_counts(engine, running=2, waiting=1)
    await engine.stop(grace_s=0.05)
    for session in sessions:
        with pytest.raises(UnavailableError, match="shutting down"):
            await next_commit(session)


async def test_long_prompts_are_read_in_parts(
    engine: TargetEngine, decoder: ScriptedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt is read in parts of bounded length, with the same tokens; other sessions decode in between."""
    monkeypatch.setattr("specdec.inference.engine.batching.MAX_PART_TOKENS", 10)
    long, short = await asyncio.gather(finish(engine, request(45)), finish(engine, request(3)))
    assert tokens(long) == tokens_at(45, 4)
    assert tokens(short) == tokens_at(3, 4)
    turns = [turn for step in decoder.steps for turn in step]
    assert max(turn.num_unread for turn in turns) <= 10
    assert sum(not turn.chooses for turn in turns) == 4
    first_choice = next(i for i, step in enumerate(decoder.steps) if any(len(turn.token_ids) >= 45 for turn in step))
    assert sum(turn.chooses for step in decoder.steps[:first_choice] for turn in step) >= 3


async def test_a_cancelled_prompt_frees_its_slot_within_a_part(
    engine: TargetEngine, decoder: ScriptedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled prompt frees its slot after the part that is being read.

    The next pass reads the request that waited for the slot.
    """
    monkeypatch.setattr("specdec.inference.engine.batching.MAX_PART_TOKENS", 5)
    decoder.gate.close()
    longs = [asyncio.create_task(finish(engine, request(50))) for _ in range(2)]
    await at_gate(decoder)
    waiting = asyncio.create_task(finish(engine, request(3)))
    await until_counts(engine, running=2, waiting=1)
    longs[0].cancel()
    await asyncio.gather(longs[0], return_exceptions=True)
    num_passes = len(decoder.steps)
    decoder.gate.open()
    assert tokens(await waiting) == tokens_at(3, 4)
    assert min(len(turn.token_ids) for turn in decoder.steps[num_passes]) == 3
    longs[1].cancel()
    await asyncio.gather(longs[1], return_exceptions=True)
    await until_counts(engine, running=0)
    assert len(decoder.steps) < 50 // 5, "no prompt was read to its end"


class SlowReader(ScriptedDecoder):
    """A decoder in which each prompt token takes a fifth of the time of a decoding pass."""

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        time.sleep(1e-3 + 2e-4 * sum(turn.num_unread for turn in turns))
        return super().step(turns)


async def test_prompts_give_way_to_decoding_sessions() -> None:
    """Prompts are read in parts so short that they delay the decoding of other sessions little.

    Regression: a prompt of 6,000 tokens, read in parts of 256, made gaps between others' tokens 13 times as long.
    """
    decoder = SlowReader(num_slots=3, max_length=900)
    async with running(TargetEngine(decoder)) as engine:
        alone = await finish(engine, request(600))
        decoding = asyncio.create_task(finish(engine, request(3, max_new_tokens=800)))
        await until(lambda: len(decoder.steps) > 40)
        longs = await asyncio.gather(finish(engine, request(600)), finish(engine, request(600)))
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
    assert tokens(longs[0]) == tokens(longs[1]) == tokens(alone)
    read = [sum(turn.num_unread for turn in step if turn.num_unread > 1) for step in decoder.steps]
    beside = [number for number, step in zip(read, decoder.steps, strict=True) if number and len(step) > 1]
    assert max(read) == 256, "alone, in parts of full length"
    assert len(beside) > 10, "beside a stream, in more and shorter ones, of both prompts together"
    assert statistics.median(beside) < 128


class SlowDrafter(SlowReader):
    """A `SlowReader` that drafts for 6 ms before each step in which a session decodes, as a fused server does."""

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        if all(turn.num_unread > 1 for turn in turns):
            return super().step(turns)
        time.sleep(6e-3)
        return [replace(verdict, draft_us=6000) for verdict in super().step(turns)]


async def test_parts_of_prompts_grow_with_the_time_of_drafting() -> None:
    """The time that a fused server takes for drafting does not make the parts of prompts shorter.

    Regression: the time of drafting counted as a cost of the prompt part in the same step, so half of 64 sessions
    waited five times as long.
    """
    decoder = SlowDrafter(num_slots=2, max_length=900)
    async with running(TargetEngine(decoder)) as engine:
        decoding = asyncio.create_task(finish(engine, request(3, max_new_tokens=800)))
        await until(lambda: len(decoder.steps) > 20)
        await finish(engine, request(600))
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
    read = [sum(turn.num_unread for turn in step if turn.num_unread > 1) for step in decoder.steps]
    assert max(read[1:]) > 48  # 72 without a wait for a core; with that fault 32, since 6 ms are the cost of 30 tokens


RIGHT = tokens_at(3, 8)
PROPOSALS: dict[str, tuple[dict[str, Any], list[int], tuple[int, int], FinishReason | None, tuple[int, ...]]] = {
    # a name: fields of the request, the proposal, tokens drafted and accepted, the end, tokens rejected
    "what is right is taken": ({"max_new_tokens": 9}, [*RIGHT[:2], 1, 2], (4, 2), None, ()),
    "three tokens are left": ({"max_new_tokens": 3}, RIGHT, (2, 2), FinishReason.LENGTH, ()),
    # Tokens after a stop token were reported as rejected, so that even a perfect draft seemed to miss.
    "a stop token": ({"max_new_tokens": 20, "stop": token_at(5)}, RIGHT, (3, 3), FinishReason.STOP, ()),
    "rejected tokens on request": (
        {"max_new_tokens": 20, "include_rejected": True},
        [*RIGHT[:2], 7, 8],
        (4, 2),
        None,
        (7, 8),
    ),
}


@pytest.mark.parametrize(("fields", "proposal", "counts", "reason", "rejected"), PROPOSALS.values(), ids=PROPOSALS)
async def test_a_proposal_is_verified_as_far_as_it_may_count(
    engine: TargetEngine,
    fields: dict[str, Any],
    proposal: list[int],
    counts: tuple[int, int],
    reason: FinishReason | None,
    rejected: tuple[int, ...],
) -> None:
    session = drafted(engine, request(3, **fields))
    engine.propose(session, [Branch(None, 3, proposal)])
    commit = await next_commit(session)
    assert list(commit.token_ids) == RIGHT[:3]
    assert (commit.num_draft_tokens, commit.num_accepted_tokens) == counts
    assert (commit.finish_reason, commit.rejected_token_ids) == (reason, rejected)
    engine.close(session)


async def test_a_proposal_of_nothing_is_a_pass(engine: TargetEngine) -> None:
    session = drafted(engine, request(6))
    engine.propose(session, [])
    assert list((await next_commit(session)).token_ids) == tokens_at(6, 1)
    assert session.idle_s >= 0
    engine.close(session)


async def test_prompt_is_read_before_the_first_proposal(engine: TargetEngine, decoder: ScriptedDecoder) -> None:
    """The target reads all but the last prompt token while it waits for the first proposal of a round."""
    session = drafted(engine, request(9))
    await until(lambda: len(decoder.steps) > 0)
    (turn,) = decoder.steps[0]
    assert (len(turn.token_ids), turn.chooses) == (8, False)
    await asyncio.sleep(0.01)
    engine.propose(session, [Branch(None, 9, [1])])
    await next_commit(session)
    assert decoder.steps[1][0].start == 8
    engine.close(session)


async def test_a_commit_has_its_workers_step_time(engine: TargetEngine) -> None:
    """The time that a worker reports with a proposal is in the next commit's timings, for the client."""
    session = drafted(engine, request(9))
    engine.propose(session, [Branch(None, 9, [1], step_us=700)])
    assert (await next_commit(session)).timings.step_us == 700
    engine.close(session)


async def test_timings_of_a_commit_add_up(engine: TargetEngine) -> None:
    for commit in await finish(engine, request()):
        assert commit.timings.compute_us >= 0
        assert commit.timings.queue_us < 5_000_000
    assert engine.pass_us > 0
