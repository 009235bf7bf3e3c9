"""Engines over the double's neuron backends, and their answers, without processes and sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.inference.commit import Commit, FinishReason
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import InternalError
from specdec.inference.model.slots import Backend, max_pass_draft_tokens
from specdec.inference.request import GenerationRequest, SamplingParams, Schedule
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.tree import Branch
from tests.support.answers import commits_of, next_commit
from tests.support.models import EOS_TOKEN_ID

MAX_LENGTH = 64

Answer = tuple[list[int], FinishReason]


def target_engine(backend: Backend) -> TargetEngine:
    """Return an engine as `specdec.inference.serving.assembly` builds it."""
    return TargetEngine(SlotDecoder(backend), EngineLimits(gamma=max_pass_draft_tokens(backend, 16)))


def requests(num_requests: int, *, seed: int, sampled: bool) -> list[GenerationRequest]:
    """Return requests with prompts of 1 to 40 tokens, some up to the end of the context, and random parameters."""
    rng = random.Random(seed)
    made = []
    for _ in range(num_requests):
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
            top_k=rng.choice([0, 1, 5, 50]),
            top_p=rng.choice([1.0, 0.95, 0.5]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.randrange(2**64),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        )
        made.append(
            GenerationRequest(
                prompt_token_ids=tuple(rng.randrange(2, 288) for _ in range(rng.choice([1, 2, 5, 13, 40]))),
                sampling=sampling if sampled else SamplingParams(),
                max_new_tokens=rng.choice([1, 2, 9, 14, 60]),
                stop_token_ids=frozenset({EOS_TOKEN_ID}),
                gamma=rng.choice([None, 1, 3, 4, 7]),
            )
        )
    return made


def greedy_reference(target: Path, wanted: Sequence[GenerationRequest]) -> list[list[int]]:
    """Return the token ids that Transformers' generate() gives for these requests."""
    model = AutoModelForCausalLM.from_pretrained(target)
    outputs = []
    for request in wanted:
        token_ids = torch.tensor([request.prompt_token_ids])
        num_new = min(request.max_new_tokens, MAX_LENGTH - token_ids.shape[1])
        mask = torch.ones_like(token_ids)
        output = model.generate(
            token_ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, pad_token_id=EOS_TOKEN_ID
        )
        outputs.append(output[0, token_ids.shape[1] :].tolist())
    return outputs


async def generate_all(engine: TargetEngine, wanted: Sequence[GenerationRequest]) -> list[Answer]:
    """Generate all answers at once: three slots serve some requests, and the others queue."""
    engine.start()
    try:
        return list(await asyncio.gather(*(_generate(engine, request) for request in wanted)))
    finally:
        await engine.stop()


async def assert_noticed(
    make: Callable[[], TargetEngine],
    wanted: Sequence[GenerationRequest],
    target: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Check that an engine over a mutant fails at its start or a step, or gives other tokens than Transformers."""

    async def play() -> None:
        answers = await generate_all(make(), wanted)
        assert [token_ids for token_ids, _ in answers] == greedy_reference(target, wanted)
        assert "a step over" not in caplog.text  # one that failed, and was repeated with success

    with pytest.raises((AssertionError, InternalError)):  # the engine's word for whatever NxDI raises
        await play()


async def _generate(engine: TargetEngine, request: GenerationRequest) -> Answer:
    return answer_of(await commits_of(engine.generate(request)))


def answer_of(commits: Sequence[Commit]) -> Answer:
    reason = commits[-1].finish_reason
    assert reason is not None
    return [token_id for commit in commits for token_id in commit.token_ids], reason


async def distribute_all(
    target: TargetEngine, drafts: DraftEngine, wanted: Sequence[GenerationRequest]
) -> tuple[list[Answer], float]:
    """Run synchronous rounds between two engines without a wire; return the answers and the acceptance rate."""
    target.start()
    drafts.start()
    try:
        pairs = await asyncio.gather(*(_distribute(target, drafts, request) for request in wanted))
    finally:
        await asyncio.gather(target.stop(), drafts.stop())
    commits = [commit for _, of_request in pairs for commit in of_request]
    num_drafted = sum(commit.num_draft_tokens for commit in commits)
    return [answer for answer, _ in pairs], sum(commit.num_accepted_tokens for commit in commits) / num_drafted


async def _distribute(
    target: TargetEngine, drafts: DraftEngine, request: GenerationRequest
) -> tuple[Answer, list[Commit]]:
    draft = drafts.open(request.prompt_token_ids, request.sampling)
    session = target.open(request)
    target.begin_help(session, Schedule.SYNC)
    commits: list[Commit] = []
    try:
        while not commits or commits[-1].finish_reason is None:
            chain = await drafts.propose(draft, request.gamma or 5)
            target.propose(session, [Branch(None, len(draft.committed), chain)] if chain else [])
            commits.append(await next_commit(session))
            drafts.commit(draft, commits[-1].token_ids)
    finally:
        drafts.close(draft)
        target.close(session)
    return answer_of(commits), commits
