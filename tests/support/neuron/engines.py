"""Requests to engines on the Neuron backend in this process, and their answers; NxDI is that of the test run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from specdec.inference.commit import Commit, FinishReason
from specdec.inference.engine.target import TargetEngine
from specdec.inference.request import GenerationRequest, SamplingParams
from tests.support.answers import commits_of
from tests.support.models import EOS_TOKEN_ID

MAX_LENGTH = 64

Answer = tuple[list[int], FinishReason]


def requests(num_requests: int, *, seed: int, sampled: bool) -> list[GenerationRequest]:
    """Return requests with random prompts of 1 to 40 tokens and random limits, some beyond the end of the context.

    With `sampled` they have random sampling parameters, else they are greedy. Equal seeds give equal requests.
    """
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
    """Return the output token ids that Transformers' greedy generate() gives for each of these requests."""
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
    """Start an engine, send it all requests at once, and stop it; return the answers in the order of the requests."""
    engine.start()
    try:
        return list(await asyncio.gather(*(_generate(engine, request) for request in wanted)))
    finally:
        await engine.stop()


async def _generate(engine: TargetEngine, request: GenerationRequest) -> Answer:
    return answer_of(await commits_of(engine.generate(request)))


def answer_of(commits: Sequence[Commit]) -> Answer:
    reason = commits[-1].finish_reason
    assert reason is not None
    return [token_id for commit in commits for token_id in commit.token_ids], reason
