"""Prompt lookup in a target changes no token, is never mixed with a draft worker's proposal, and is counted apart."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from specdec.inference.commit import Commit
from specdec.inference.config import NEVER
from specdec.inference.engine.contract import VerificationSession
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.model.decoder import Decoder
from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.request import GenerationRequest, Grammar, GrammarKind, SamplingParams, Schedule
from specdec.inference.scheduling.draft_length import DraftLength
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from specdec.inference.speculation.tree import Branch
from tests.support.answers import commits_of, each_commit, tokens
from tests.support.grammars import grammars
from tests.support.law import Bigrams
from tests.support.models import DEFAULT_VOCAB_SIZE, EOS_TOKEN_ID
from tests.support.scripted import SilentWorker

LIMITS = EngineLimits(gamma=8, eos_token_ids=frozenset([EOS_TOKEN_ID]))
PLAIN = GenerationRequest(tuple(range(20, 40)), max_new_tokens=64, logprobs=1)
OBJECTS = Grammar(GrammarKind.REGEX, r'(\{"name":[a-e],"value":[0-9]+\}, ?){3,}')
REQUESTS = {
    "greedy": PLAIN,
    "sampled": replace(PLAIN, sampling=SamplingParams(temperature=0.3, seed=5)),
    "hot": replace(PLAIN, sampling=SamplingParams(temperature=2.0, top_p=0.9, seed=6)),
    "penalties": replace(PLAIN, sampling=SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1)),
    "stops": replace(PLAIN, stop_token_ids=frozenset(range(60, 64))),
    "grammar": replace(PLAIN, grammar=OBJECTS, stop_at_eos=True),
}


class Helper(SilentWorker):
    """Draft worker that sends a proposal after about half of the commits; most of its tokens are right."""

    def __init__(self, pool: DraftPool, truth: Sequence[int]) -> None:
        super().__init__("helper", 4, pool)
        self._truth, self._rng = truth, random.Random(5)

    def commit(self, session: VerificationSession, commit: Commit) -> None:
        branches = proposals(session, self._truth, self._rng)
        if branches:
            asyncio.get_running_loop().call_soon(self._pool.propose, self, session.help_id, branches)


class Moody:
    """A `Proposer` that proposes nothing half of the time, and random tokens otherwise."""

    num_slots, max_length, num_branches = 4, 400, 0

    def __init__(self) -> None:
        self._rng = random.Random(3)

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        return [[self._token()] if self._rng.random() < 0.5 else [] for _ in drafts]

    def _token(self) -> DraftToken:
        return DraftToken(self._rng.randrange(DEFAULT_VOCAB_SIZE))


def table_model() -> Bigrams:
    """Return a model whose greedy text repeats itself, so that prompt lookup finds tokens."""
    logits = np.random.default_rng(1).normal(scale=3.0, size=(DEFAULT_VOCAB_SIZE, DEFAULT_VOCAB_SIZE))
    return Bigrams(logits, num_slots=4, max_length=400)


def engine_of(decoder: Decoder, limits: EngineLimits = LIMITS) -> TargetEngine:
    return TargetEngine(decoder, limits, grammars())


_truths: dict[GenerationRequest, list[Commit]] = {}


async def plainly(request: GenerationRequest) -> list[Commit]:
    """Return the commits of a request answered without draft tokens (gamma 0); they are computed once and kept."""
    request = replace(request, gamma=0)
    if request not in _truths:
        _truths[request] = await alone(request)
    return _truths[request]


async def alone(request: GenerationRequest) -> list[Commit]:
    async with running(engine_of(SlotDecoder(table_model()))) as engine:
        return await commits_of(engine.generate(request))


async def fused(request: GenerationRequest) -> list[Commit]:
    async with running(engine_of(SpeculativeDecoder(SlotDecoder(table_model()), Moody(), DraftLength()))) as engine:
        return await commits_of(engine.generate(request))


def proposals(session: VerificationSession, truth: Sequence[int], rng: random.Random) -> list[Branch]:
    """Return at random no proposal, or a chain in which nine tokens in ten are right with a random branch beside it.

    `truth` is the whole answer, from the first token after the prompt of PLAIN.
    """
    if rng.random() < 0.5:
        return []
    start = len(session.token_ids)
    right = truth[start - len(PLAIN.prompt_token_ids) :][: rng.randrange(1, 6)] or [5]
    chain = [each if rng.random() < 0.9 else rng.randrange(DEFAULT_VOCAB_SIZE) for each in right]
    return [Branch(None, start, chain), Branch(None, start, [rng.randrange(DEFAULT_VOCAB_SIZE), 7])]


def drafted(schedule: Schedule) -> Callable[[GenerationRequest], asyncio.Future[list[Commit]]]:
    async def run(request: GenerationRequest) -> list[Commit]:
        truth = tokens(await plainly(request))
        commits, rng = [], random.Random(4)
        async with running(engine_of(SlotDecoder(table_model()))) as engine:
            wanted = replace(request, gamma=8)
            session = engine.open(wanted, grammar=await engine.compiled(wanted))
            engine.begin_help(session, schedule)
            engine.propose(session, [])
            async for commit in each_commit(engine.answer(session)):
                commits.append(commit)
                branches = proposals(session, truth, rng)
                if branches or schedule is Schedule.SYNC:
                    engine.propose(session, branches)
        return commits

    return run  # type: ignore[return-value]


async def pooled(request: GenerationRequest) -> list[Commit]:
    truth = tokens(await plainly(request))
    async with running(engine_of(SlotDecoder(table_model()))) as engine:
        pool = DraftPool(engine)
        pool.attach(Helper(pool, truth))
        return await commits_of(pool.generate(request))


TOPOLOGIES = {
    "alone": alone,
    "fused": fused,
    "rounds": drafted(Schedule.SYNC),
    "run-ahead": drafted(Schedule.ASYNC),
    "pool": pooled,
}


@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_tokens_are_those_of_one_token_a_pass(topology: str, asked: str) -> None:
    """Prompt lookup changes no token, and no pass verifies looked-up tokens together with a draft worker's tokens."""
    request = REQUESTS[asked]
    expected = await plainly(request)
    commits = await TOPOLOGIES[topology](request)
    assert tokens(commits) == tokens(expected)
    assert commits[-1].finish_reason is expected[-1].finish_reason
    chosen = [next(iter(each)) for commit in commits for each in commit.logprobs]
    assert chosen == [next(iter(each)) for commit in expected for each in commit.logprobs]
    for commit in commits:
        own = commit.own
        num_of_draft = commit.num_draft_tokens - own.num_tokens
        assert num_of_draft >= commit.num_accepted_tokens - own.num_accepted >= 0
        assert own.num_lookup_tokens >= own.num_lookup_accepted >= 0
        assert own.num_forced_tokens >= own.num_forced_accepted >= 0
        assert not (num_of_draft and own.num_lookup_tokens)
    if asked == "greedy":
        assert sum(commit.own.num_lookup_accepted for commit in commits) > 0
    if asked == "grammar":
        assert sum(commit.own.num_forced_accepted for commit in commits) > 0


async def test_gamma_0_and_the_setting_switch_it_off() -> None:
    assert not any(commit.num_draft_tokens for commit in await alone(replace(PLAIN, gamma=0)))
    async with running(engine_of(SlotDecoder(table_model()), replace(LIMITS, lookup=False))) as engine:
        assert not any(commit.num_draft_tokens for commit in await commits_of(engine.generate(PLAIN)))


async def test_lookups_earn_a_silent_worker_no_trust() -> None:
    """Accepted tokens of prompt lookup do not raise a draft worker's limit of sessions, as the worker's own would."""
    async with running(engine_of(SlotDecoder(table_model()))) as engine:
        pool = DraftPool(engine)
        pool.attach(silent := SilentWorker("silent", 100, pool))
        trust = pool._workers[silent].trust
        commits = await commits_of(pool.generate(replace(PLAIN, max_new_tokens=150)))
        assert sum(commit.own.num_lookup_accepted for commit in commits) > 10
        assert pool._workers[silent].trust <= trust


async def test_a_long_prompt_is_taken_in_part_by_part() -> None:
    """Prompt lookup finds tokens in a prompt that the target reads in parts."""
    truth = tokens(await plainly(PLAIN))
    prompt = (*PLAIN.prompt_token_ids, *truth[:40])
    request = GenerationRequest(prompt, max_new_tokens=20)
    commits = await alone(request)
    assert tokens(commits) == tokens(await plainly(request))
    assert commits[0].own.num_lookup_accepted + commits[1].own.num_lookup_accepted > 0


class Forbidden(Moody):
    """A `Proposer` that fails the test if it is asked for draft tokens."""

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        raise AssertionError("the draft computes")


@pytest.mark.parametrize("asked", ["greedy", "grammar"])
async def test_a_fused_draft_that_is_held_computes_nothing(asked: str) -> None:
    """While drafting is off, passes verify looked-up tokens and tokens that a grammar forces; the draft is idle."""
    decoder = SpeculativeDecoder(SlotDecoder(table_model()), Forbidden(), DraftLength())
    async with running(engine_of(decoder, replace(LIMITS, drafting=NEVER))) as engine:
        commits = await commits_of(engine.generate(REQUESTS[asked]))
    assert tokens(commits) == tokens(await plainly(REQUESTS[asked]))
    own = [commit.own for commit in commits]
    assert sum(each.num_forced_accepted if asked == "grammar" else each.num_lookup_accepted for each in own) > 0
    assert all(commit.is_held for commit in commits)
