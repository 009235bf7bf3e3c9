"""Tests that this project's engine over the real vLLM keeps the contract of all engines, and gives ONNX's tokens."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from specdec.inference.commit import Commit
from specdec.inference.engine.contract import VerificationSession
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import TargetEngine
from specdec.inference.request import GenerationRequest, Grammar, GrammarKind, Noise
from specdec.inference.scheduling.pass_times import MAX_AGE
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.tree import Branch
from specdec.inference.vllm.engine import VllmMetrics
from specdec.inference.vllm.group import members
from tests.support.engine_contract import MODES, PROMPT, REGEX, Drafting, EngineContract, completed, onnx_engine, wanted
from tests.vllm.conftest import LAW, MAX_LENGTH, Pair
from tests.vllm.test_servers import command_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

WRONG = 5
"""Token id that no text contains; as a draft token it is always rejected."""
LONG = tuple((PROMPT * 4)[:100])
"""Prompt of 100 tokens, which vLLM reads in two passes."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def onnx(pair: Pair) -> AsyncGenerator[TargetEngine, None]:
    async with running(onnx_engine(pair.target, MAX_LENGTH, LAW)) as engine:
        yield engine


async def test_the_first_grammar_runs_beside_a_stream(vllm: Any, onnx: TargetEngine) -> None:
    """The first request with a grammar, whose compiler a thread must load, gets its tokens beside a running stream."""
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"enum": [1, 25]}}}')
    requests = [wanted(max_new_tokens=60), wanted(grammar=schema, stop_at_eos=True)]
    tokens = [(await completed(onnx, request))[0] for request in requests]
    got = await asyncio.gather(*(completed(vllm, request) for request in requests))
    assert [each for each, _ in got] == tokens


class TestVllmEngine(EngineContract):
    @pytest.fixture
    def engine(self, vllm: Any) -> Any:
        return vllm


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], LONG], ids=["short", "one token", "in parts"])
async def test_the_tokens_are_those_of_our_own_engine(vllm: Any, onnx: TargetEngine, mode: str, prompt: Any) -> None:
    request = wanted(mode, prompt=prompt, max_new_tokens=28)
    tokens, _ = await completed(onnx, request)
    assert (await completed(vllm, request))[0] == tokens
    assert (await completed(vllm, request, Drafting(tokens, 0.3, random.Random(1))))[0] == tokens


@pytest.mark.parametrize(
    "request_",
    [
        wanted(grammar=REGEX, stop_at_eos=True),
        wanted(min_new_tokens=12, stop_token_ids=frozenset(range(97, 123))),
        wanted(stop_token_ids=frozenset({32, 101})),
        wanted(max_new_tokens=10_000),
    ],
    ids=["grammar", "minimum length", "stop tokens", "to the end of the context"],
)
async def test_ends_are_those_of_our_own_engine(vllm: Any, onnx: TargetEngine, request_: GenerationRequest) -> None:
    tokens, commits = await completed(onnx, request_)
    drafting = Drafting(tokens, 0.3, random.Random(4))
    for drafted, ours in (await completed(vllm, request_), await completed(vllm, request_, drafting)):
        assert drafted == tokens
        assert ours[-1].finish_reason is commits[-1].finish_reason


@pytest.mark.parametrize("num_cached", [32, 64])
async def test_a_grammar_holds_where_one_token_of_a_prompt_is_new(
    vllm: Any, onnx: TargetEngine, num_cached: int
) -> None:
    """A request with a grammar gets the same tokens if all of its prompt but one token is in the prefix cache.

    Regression: vLLM pads the draft tokens of such a request with -1, which no grammar accepts, and its engine core
    ended.
    """
    prompt = tuple(random.Random(num_cached).choices(range(97, 123), k=num_cached + 1))
    request = wanted(prompt=prompt, grammar=REGEX, stop_at_eos=True, cache_salt="grammar")
    tokens, _ = await completed(onnx, request)
    for _ in range(2):
        assert (await completed(vllm, request))[0] == tokens


async def test_log_probabilities_are_those_of_our_own_engine(vllm: Any, onnx: TargetEngine) -> None:
    request = wanted("penalties", logprobs=3, prompt_logprobs=2)
    tokens, commits = await completed(onnx, request)
    _, ours = await completed(vllm, request, Drafting(tokens, 0.3, random.Random(6)))
    pairs = zip(*([each for commit in part for each in commit.logprobs] for part in (commits, ours)), strict=True)
    for theirs, scores in pairs:
        assert scores.token_ids == theirs.token_ids
        assert scores.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


async def test_tokens_that_are_looked_up_fill_passes_without_a_worker(vllm: Any, onnx: TargetEngine) -> None:
    """A request whose text repeats one token gets the same tokens, with drafts by prompt lookup and by nothing else.

    It is repeated, since an engine core that other work slowed down may take drafts for too dear, until it measures
    their cost anew.
    """
    request = wanted("greedy", max_new_tokens=60)
    request = replace(request, sampling=replace(request.sampling, logit_bias=((97, 100.0),)))
    tokens, _ = await completed(onnx, request)
    for _ in range(2 + MAX_AGE // 60):
        got, commits = await completed(vllm, request)
        assert got == tokens
        assert all(commit.num_draft_tokens == commit.own.num_lookup_tokens for commit in commits)
        # In Triton's interpreter each row of a pass is so dear that no lookup pays.
        if LAW is Noise.VLLM or sum(commit.own.num_lookup_accepted for commit in commits) > 0:
            return
    raise AssertionError("no pass had tokens that were looked up")


async def test_requests_that_lose_their_memory_go_on_with_the_same_tokens(vllm: Any, onnx: TargetEngine) -> None:
    """Requests that vLLM preempts for lack of KV-cache blocks, and computes again, get the same tokens.

    Four requests of 100 tokens need more blocks than there are.
    """
    requests = [wanted(mode, prompt=PROMPT[number:], max_new_tokens=70) for number, mode in enumerate([*MODES][1:5])]
    tokens = [(await completed(onnx, request))[0] for request in requests]
    before = counted("vllm:num_preemptions")
    drafts = [Drafting(each, 0.3, random.Random(7)) for each in tokens]
    got = await asyncio.gather(*(completed(vllm, *each) for each in zip(requests, drafts, strict=True)))
    assert [each for each, _ in got] == tokens
    assert counted("vllm:num_preemptions") > before


def counted(name: str) -> float:
    """Return the sum of one of vLLM's own counters over its series, as this project's metrics show them."""
    metrics = [metric for metric in VllmMetrics(CollectorRegistry()).collect() if metric.name == name]
    return sum(sample.value for metric in metrics for sample in metric.samples if sample.name == f"{name}_total")


async def test_prefixes_are_shared_within_one_salt_alone(vllm: Any) -> None:
    prompt = tuple(random.Random(8).choices(range(97, 123), k=80))
    cached = []
    for salt in ("one", "one", "other", ""):
        session = vllm.open(wanted(prompt=prompt, max_new_tokens=4, cache_salt=salt))
        async for _ in vllm.answer(session):
            pass
        cached.append(session.num_cached_tokens)
    assert cached[0] == cached[2] == cached[3] == 0
    assert cached[1] >= 64


class Useless:
    """Draft worker whose tokens are all wrong, and which slows the engine core down unless it is told to stop.

    `loads` are the processes that do so; they stand still while the worker must not draft.
    """

    id, num_slots, does_rounds, takes_hold, scope = "useless", 8, False, True, ""

    def __init__(self, pool: DraftPool, loads: list[subprocess.Popen[bytes]]) -> None:
        self._pool, self._loads = pool, loads

    def open(self, session: VerificationSession) -> None:
        branch = Branch(None, len(session.token_ids), [WRONG] * 4)
        asyncio.get_running_loop().call_soon(self._pool.propose, self, session.help_id, [branch])

    def commit(self, session: VerificationSession, commit: Commit) -> None:
        self.open(session)

    def close(self, session: VerificationSession) -> None: ...

    def hold(self, number: int, *, is_on: bool) -> None:
        for each in self._loads:
            each.send_signal(signal.SIGSTOP if is_on else signal.SIGCONT)
        if is_on:
            self._pool.held(self, number)


@contextmanager
def loads_beside_the_core() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes that compete with the engine core for one processor while the block runs; yield them."""
    (core,) = (each for each in members(os.getpgrp()) if b"EngineCore" in command_of(each))
    usable = os.sched_getaffinity(core)
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        for each in (core, *(load.pid for load in loads)):
            os.sched_setaffinity(each, {min(usable)})
        yield loads
    finally:
        os.sched_setaffinity(core, usable)
        for load in loads:
            load.kill()
            load.wait()


@pytest.mark.release  # it depends on measured times
async def test_a_worker_that_only_costs_is_held_and_changes_nothing(vllm: Any, onnx: TargetEngine) -> None:
    """With `--drafting measured`, a draft worker that only costs time is told to stop, and changes no token.

    This test is the last one, since the engine does not draft after it.
    """
    requests = [wanted(mode, prompt=PROMPT[number:12], max_new_tokens=50) for number, mode in enumerate([*MODES][:4])]
    tokens = [(await completed(onnx, request))[0] for request in requests]
    pool = DraftPool(vllm)

    async def answer(request: GenerationRequest) -> list[Commit]:
        return [event async for event in pool.generate(request) if isinstance(event, Commit)]

    share_held = 0.0
    with loads_beside_the_core() as loads:
        pool.attach(Useless(pool, loads))
        async with asyncio.timeout(300):
            while share_held < 0.8:
                answers = await asyncio.gather(*map(answer, requests))
                assert [[each for commit in commits for each in commit.token_ids] for commits in answers] == tokens
                commits = [commit for answer in answers for commit in answer]
                share_held = sum(commit.is_held for commit in commits) / len(commits)
    assert vllm.drafting.num_switches > 0
