"""Predictions sent with requests, and kept earlier answers, change no token and let an answer take few passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specdec.inference.caller import Caller, request_context
from specdec.inference.commit import Commit
from specdec.inference.engine.target import TargetEngine
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.scheduling.draft_length import DraftLength
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from tests.support.answers import commits_of, tokens
from tests.support.models import DEFAULT_VOCAB_SIZE
from tests.unit.engine.test_lookup import LIMITS, REQUESTS, TOPOLOGIES, Moody, alone, engine_of, plainly, table_model

HOT = REQUESTS["hot"]
KEEPING = replace(LIMITS, answers_bytes=1 << 20)


def edited(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return an output with some tokens replaced, left out and added."""
    rng = random.Random(7)
    edited = [*token_ids]
    for place in range(len(edited) - 3, 0, -10):
        edited[place : place + rng.randrange(3)] = [rng.randrange(DEFAULT_VOCAB_SIZE) for _ in range(rng.randrange(3))]
    return tuple(edited)


PREDICTIONS: dict[str, Callable[[Sequence[int]], tuple[int, ...]]] = {
    "right": tuple,
    "edited": edited,
    "wrong": lambda token_ids: tuple(reversed(token_ids)),
}


@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_no_prediction_changes_a_token(topology: str, kind: str, asked: str) -> None:
    expected = await plainly(REQUESTS[asked])
    request = replace(REQUESTS[asked], prediction=PREDICTIONS[kind](tokens(expected)))
    commits = await TOPOLOGIES[topology](request)
    assert tokens(commits) == tokens(expected)
    assert commits[-1].finish_reason is expected[-1].finish_reason
    for commit in commits:
        assert commit.own.num_lookup_accepted <= commit.own.num_lookup_tokens
        assert commit.own.num_lookup_tokens or not commit.own.is_predicted
    predicted = sum(commit.own.num_lookup_accepted for commit in commits if commit.own.is_predicted)
    if kind == "right":
        assert predicted > 0.5 * len(tokens(expected)) or asked == "grammar"
        assert len(commits) <= 12


async def test_gamma_0_switches_predictions_off() -> None:
    request = replace(HOT, prediction=tuple(tokens(await plainly(HOT))), gamma=0)
    assert not any(commit.num_draft_tokens for commit in await alone(request))


async def test_a_prediction_goes_on_without_lookup() -> None:
    request = replace(HOT, prediction=tuple(tokens(await plainly(HOT))))
    async with running(engine_of(SlotDecoder(table_model()), replace(LIMITS, lookup=False))) as engine:
        commits = await commits_of(engine.generate(request))
    assert all(commit.own.is_predicted for commit in commits if commit.own.num_lookup_tokens)
    assert len(commits) <= 8


async def test_a_resumed_request_goes_on_with_its_prediction() -> None:
    output = tokens(await plainly(HOT))
    rest = replace(HOT, prediction=tuple(output)).resumed(output[:30])
    commits = await alone(rest)
    assert tokens(commits) == output[30:]
    assert len(commits) <= 6


async def again(request: GenerationRequest, engine: TargetEngine) -> list[Commit]:
    return await commits_of(engine.generate(request))


@pytest.mark.parametrize("decoder", ["alone", "fused"])
@pytest.mark.parametrize("asked", REQUESTS)
async def test_the_second_answer_follows_the_first(decoder: str, asked: str) -> None:
    """A repeated request gets the same tokens in few passes; one with another seed gets its own tokens.

    `decoder` is "alone" or "fused" (with a draft), and `asked` a key of REQUESTS.
    """
    request, target = REQUESTS[asked], SlotDecoder(table_model())
    model = target if decoder == "alone" else SpeculativeDecoder(target, Moody(), DraftLength())
    async with running(engine_of(model, KEEPING)) as engine:
        first = await again(request, engine)
        second = await again(request, engine)
        other = replace(request, sampling=replace(request.sampling, seed=99))
        others = await again(other, engine)
    assert tokens(first) == tokens(second) == tokens(await plainly(request))
    assert tokens(others) == tokens(await plainly(other))
    assert len(second) <= 12
    assert not any(commit.own.is_predicted for commit in second)


async def test_nothing_is_kept_by_default() -> None:
    async with running(engine_of(SlotDecoder(table_model()))) as engine:
        first, second = await again(HOT, engine), await again(HOT, engine)
    assert len(second) > 0.5 * len(first)


@pytest.mark.parametrize(
    ("who", "salt", "shares"), [("one", "", True), ("two", "", False), ("one", "salt", False), ("two", "salt", False)]
)
async def test_answers_are_drafts_for_their_own_account_and_salt_alone(who: str, salt: str, shares: bool) -> None:
    """An answer gives draft tokens only to its own account, and only under its own cache salt.

    `shares` tells whether account `who`, with `salt`, gets draft tokens of the answer to account "one" with no salt.

    That holds even for accounts that share cached prefixes. Clients can see rejected draft tokens, so drafts from
    another account's text would reveal that text.
    """
    groups = {"one": "team", "two": "team"}
    request = replace(HOT, include_rejected=True)
    async with running(engine_of(SlotDecoder(table_model()), replace(KEEPING, lookup=False))) as engine:
        with request_context(Caller("one", prefix_groups=groups), "a"):
            await again(request, engine)
        with request_context(Caller(who, prefix_groups=groups), "b"):
            commits = await again(replace(request, cache_salt=salt), engine)
    assert any(commit.num_draft_tokens for commit in commits) == shares


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.ASYNC])
async def test_a_prediction_does_not_wait_for_a_silent_worker(schedule: Schedule) -> None:
    request = replace(HOT, prediction=tuple(tokens(await plainly(HOT))))
    async with running(engine_of(SlotDecoder(table_model()))) as engine:
        session = engine.open(request)
        engine.begin_help(session, schedule)
        commits = await commits_of(engine.answer(session))
    assert tokens(commits) == tokens(await plainly(HOT))
