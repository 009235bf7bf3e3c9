"""The memory of committed tokens that clients have not read is limited for each call, and for all calls together."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from specdec.inference.commit import Commit, TokenLogprobs
from specdec.inference.engine import target as module
from specdec.inference.engine.target import TargetEngine
from specdec.inference.engine.target_session import TargetSession
from specdec.inference.errors import CapacityError
from specdec.inference.request import GenerationRequest
from specdec.inference.serving.assembly import running
from tests.support.answers import tokens_of
from tests.support.scripted import ScriptedDecoder, tokens_at, until


@pytest.fixture
async def engine() -> AsyncGenerator[TargetEngine, None]:
    async with running(TargetEngine(ScriptedDecoder(num_slots=2))) as engine:
        yield engine


def unread(engine: TargetEngine, num_tokens: int) -> TargetSession:
    """Open a session whose client does not read its commits."""
    return engine.open(GenerationRequest((1, 2, 3), max_new_tokens=num_tokens))


async def finish(engine: TargetEngine, session: TargetSession) -> list[int]:
    return await tokens_of(engine.answer(session))


async def test_a_call_that_reads_nothing_is_ended(engine: TargetEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose client reads nothing is ended once its unread tokens exceed a limit of memory.

    Regression: commits for such a call piled up to its last token, 300 MB with a long context.
    """
    monkeypatch.setattr(module, "UNREAD_BYTES_OF_CALL", 20_000)
    session = unread(engine, 900)
    await until(lambda: engine.num_running == engine.num_waiting == 0)
    assert len(session.token_ids) < 100
    with pytest.raises(CapacityError, match="read faster"):
        await finish(engine, session)
    assert await finish(engine, unread(engine, 900)) == tokens_at(3, 900)  # a client that reads gets all, however long


async def test_of_many_answers_that_wait_the_longest_goes_first(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If unread answers take too much memory, the longest one is dropped first.

    Regression: a finished call holds no slot, so a client could leave any number of answers unread.
    """
    monkeypatch.setattr(module, "UNREAD_BYTES", 100_000)
    sessions = [unread(engine, num_tokens) for num_tokens in (40, 120, 60)]
    await until(lambda: engine.num_running == engine.num_waiting == 0)
    with pytest.raises(CapacityError, match="read faster"):
        await finish(engine, sessions[1])
    assert await finish(engine, sessions[0]) == tokens_at(3, 40)
    assert await finish(engine, sessions[2]) == tokens_at(3, 60)


async def test_read_and_cancelled_answers_are_forgotten(engine: TargetEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREAD_BYTES", 100_000)
    for _ in range(5):
        given_up = unread(engine, 100)
        await until(lambda: engine.num_running == engine.num_waiting == 0)
        del given_up
    read = unread(engine, 100)
    await until(lambda: engine.num_running == engine.num_waiting == 0)
    assert await finish(engine, read) == tokens_at(3, 100)
    assert read.commits.num_bytes == 0


def test_log_probabilities_count() -> None:
    scores = TokenLogprobs((1,) + (2,) * 20, (-1.0,) + (-2.0,) * 20)
    assert Commit(0, (1, 2), logprobs=(scores, scores)).num_bytes > Commit(0, (1, 2)).num_bytes + 42 * 100
