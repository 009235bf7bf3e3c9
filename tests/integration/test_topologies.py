"""Tests that every topology gives the target's own tokens, and refuses the same requests.

Real processes: a target, draft servers of three qualities that let it verify, and a server with both models.
"""

from __future__ import annotations

import json
import random
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.inference.backends.onnx.packed import packed_decoder
from specdec.inference.commit import FinishReason
from specdec.inference.request import MAX_SEED, SamplingParams, Schedule, SeedScope
from specdec.inference.serving.processes import ServerProcess
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support.prompts import PROMPTS
from tests.support.servers import Completion, complete, complete_all, draft_server

pytestmark = pytest.mark.slow

NUM_TOKENS = 16
MAX_LENGTH = 128  # of the tiny models
HELPERS = ("related", "stranger", "itself", "fused")

Topologies = dict[str, ServerProcess]


@pytest.fixture(scope="module")
def greedy_tokens(models: ModelDirectories) -> list[list[int]]:
    """Return the token ids that Transformers' own generate() gives after each of PROMPTS."""
    tokenizer = Tokenizer.load(models.target)
    model = AutoModelForCausalLM.from_pretrained(models.target)
    (eos,) = tokenizer.eos_token_ids
    outputs = []
    for prompt in PROMPTS:
        token_ids = torch.tensor([tokenizer.encode(prompt)])
        output = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=eos,
        )
        outputs.append(output[0, token_ids.shape[1] :].tolist())
    return outputs


def greedy_requests() -> list[CompletionRequest]:
    """Return greedy requests for which the target waits for each proposal of its draft.

    If the draft ran ahead, the number of verified draft tokens would depend on timing.
    """
    return [CompletionRequest(prompt, max_new_tokens=NUM_TOKENS, schedule=Schedule.SYNC) for prompt in PROMPTS]


def sampled_requests(num_requests: int, *, seed: int) -> list[CompletionRequest]:
    """Return requests with random sampling parameters, some greedy; equal seeds give equal requests."""
    rng = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.7, 5.0]),
            top_k=rng.choice([0, 0, 1, 5, 50, 1000]),
            top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.1]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
        )
        requests.append(
            CompletionRequest(
                prompt=rng.choice(PROMPTS),
                sampling=sampling,
                seed=rng.choice([0, 1, MAX_SEED, rng.randrange(MAX_SEED)]),
                max_new_tokens=rng.choice([1, 2, 5, 13, 20]),
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=frozenset(rng.sample(range(2, 288), rng.choice([0, 0, 20]))),
                gamma=rng.choice([None, 0, 1, 3, 4, 7, 8, 20]),
                schedule=rng.choice([None, Schedule.SYNC, Schedule.ASYNC]),
                seed_scope=rng.choice(list(SeedScope)),
            )
        )
    return requests


def uncached(requests: list[CompletionRequest]) -> list[CompletionRequest]:
    """Return the requests, each with a `cache_salt` of its own, so that none uses another one's cached prefix."""
    return [replace(request, cache_salt=secrets.token_hex()) for request in requests]


def answers(completions: list[Completion]) -> list[tuple[list[int], str, FinishReason | None]]:
    return [(completion.token_ids, completion.text, completion.reason) for completion in completions]


def rate(completions: list[Completion]) -> float:
    num_draft_tokens = sum(completion.num_draft_tokens for completion in completions)
    return sum(completion.num_accepted_tokens for completion in completions) / num_draft_tokens


async def test_target_alone_equals_transformers(target: ServerProcess, greedy_tokens: list[list[int]]) -> None:
    """A target gives Transformers' greedy tokens, with prompt lookup and without (gamma 0)."""
    assert len(set(PROMPTS)) >= 50
    requests = [replace(request, gamma=None if i % 2 else 0) for i, request in enumerate(greedy_requests())]
    completions = await complete_all(target, requests)
    assert [completion.token_ids for completion in completions] == greedy_tokens
    assert sum(completion.num_draft_tokens for completion in completions) == 0
    assert sum(completion.num_lookup_tokens for completion in completions[::2]) == 0
    assert sum(completion.num_lookup_tokens for completion in completions[1::2]) > 0


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("helper", HELPERS)
async def test_greedy_equals_transformers(
    topologies: Topologies, greedy_tokens: list[list[int]], helper: str, concurrency: int
) -> None:
    """Every topology gives Transformers' greedy tokens, at any gamma, with cached prefixes and without."""
    requests = [replace(request, gamma=1 + number % 8) for number, request in enumerate(greedy_requests())]
    requests[::2] = uncached(requests[::2])
    some = slice(concurrency % 3, None, 3)
    completions = await complete_all(topologies[helper], requests[some], concurrency=concurrency)
    assert [completion.token_ids for completion in completions] == greedy_tokens[some]


@pytest.mark.parametrize("helper", HELPERS)
async def test_sampling_equals_the_target_alone(topologies: Topologies, target: ServerProcess, helper: str) -> None:
    """With equal seeds, each topology gives the target's own sampled tokens, for random sampling parameters."""
    requests = sampled_requests(32, seed=HELPERS.index(helper))
    alone = await complete_all(target, uncached(requests), concurrency=3)
    helped = await complete_all(topologies[helper], requests, concurrency=8)
    assert answers(helped) == answers(alone)
    assert [completion.seed for completion in helped] == [completion.seed for completion in alone]
    for completion, request in zip(helped, requests, strict=True):
        assert (completion.seed == request.seed) == (request.seed_scope is SeedScope.ALL)


async def test_drafts_of_every_quality_are_among_them(topologies: Topologies) -> None:
    """The three drafts have a low, a middle and a full acceptance rate, so that the tests here cover all of these."""
    in_rounds: Any = {"gamma": 4, "schedule": Schedule.SYNC}
    requests = [
        CompletionRequest(prompt, SamplingParams(temperature=1.0), seed=7, max_new_tokens=NUM_TOKENS, **in_rounds)
        for prompt in PROMPTS[:16]
    ]
    rates = {helper: rate(await complete_all(topologies[helper], requests)) for helper in HELPERS}
    assert rates["stranger"] < 0.2 < rates["related"] < 0.8
    assert rates["itself"] == 1.0
    assert rates["fused"] == pytest.approx(rates["related"], abs=0.02)


@pytest.mark.parametrize("helper", ["target", *HELPERS])
async def test_a_chats_next_turn_reuses_the_last(topologies: Topologies, target: ServerProcess, helper: str) -> None:
    server = (topologies | {"target": target})[helper]
    salt = secrets.token_hex()
    prompt = tuple(random.Random(helper).choices(range(2, 288), k=40))
    first = await complete(server, CompletionRequest(prompt, max_new_tokens=8, ignore_eos=True, cache_salt=salt))
    longer = CompletionRequest((*prompt, *first.token_ids, 5, 6), max_new_tokens=8, cache_salt=salt)
    second, anew = await complete(server, longer), (await complete_all(server, uncached([longer])))[0]
    assert (first.num_cached_tokens, anew.num_cached_tokens) == (0, 0)
    assert 40 <= second.num_cached_tokens <= 48
    assert answers([second]) == answers([anew])


@pytest.mark.parametrize("helper", HELPERS)
async def test_goes_on_to_the_end_of_the_context(topologies: Topologies, target: ServerProcess, helper: str) -> None:
    """An answer goes on to the end of the target's context, even if the draft's own context is shorter."""
    prompt = tuple(range(2, 2 + MAX_LENGTH - 80))
    long_prompt = tuple(range(2, 2 + MAX_LENGTH - 1))
    requests = [
        CompletionRequest(prompt, max_new_tokens=200, ignore_eos=True, gamma=3),
        CompletionRequest(prompt, SamplingParams(temperature=1.0), seed=3, max_new_tokens=200, ignore_eos=True),
        CompletionRequest(long_prompt, max_new_tokens=200, ignore_eos=True),
    ]
    alone, helped = await complete_all(target, requests), await complete_all(topologies[helper], requests)
    assert answers(helped) == answers(alone)
    assert [len(completion.token_ids) for completion in helped] == [80, 80, 1]
    assert all(completion.reason is FinishReason.LENGTH for completion in helped)


async def test_a_drawn_seed_is_reported_and_repeats_the_answer(topologies: Topologies, target: ServerProcess) -> None:
    request = CompletionRequest("the wind", SamplingParams(temperature=1.5), max_new_tokens=12)
    first, second = await complete_all(topologies["related"], [request, request])
    assert first.seed != second.seed
    assert (await complete(target, replace(request, seed=first.seed))).token_ids == first.token_ids


@pytest.mark.parametrize("server", ["target", "related", "fused"])
async def test_rejected_drafts_are_shown_on_request_alone(
    topologies: Topologies, target: ServerProcess, server: str
) -> None:
    """Rejected draft tokens are shown only on request, and showing them changes no token of the answer.

    Some rejected tokens have no text, since ids that pad the vocabulary have none. The last pass of an answer
    is not checked, since a limit of the request may cut it.
    """
    requests = [replace(request, seed=5, ignore_eos=True) for request in greedy_requests()[:8]]
    plain = await complete_all((topologies | {"target": target})[server], requests)
    shown = [replace(request, include_rejected=True) for request in requests]
    completions = await complete_all((topologies | {"target": target})[server], shown)
    assert [completion.token_ids for completion in completions] == [completion.token_ids for completion in plain]
    assert not any(text for completion in plain for _, text in completion.rejected)
    passes = [rejected for completion in completions for rejected in completion.rejected[:-1]]
    assert not any(text for num, text in passes if not num)
    assert any(text for _, text in passes) or server == "target"


@pytest.mark.long
async def test_other_eos_ids_of_a_draft_change_nothing(
    models: ModelDirectories, target: ServerProcess, tmp_path: Path
) -> None:
    """Text ends at the target's end-of-sequence ids, whatever the draft's are.

    Regression: the draft worker sent its own end-of-sequence ids, so text ended too early or went on.
    """
    draft = shutil.copytree(models.related, tmp_path / "draft")
    eos = list(range(20, 80))  # every few tokens one of them
    (draft / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    packed_decoder(draft, "float32", None)
    common = CompletionRequest("", SamplingParams(temperature=1.0), max_new_tokens=60)
    requests = [
        replace(common, prompt=f"the {i} wind", seed=i, schedule=schedule) for i in range(8) for schedule in Schedule
    ]
    alone = await complete_all(target, requests)
    assert any(set(completion.token_ids) & set(eos) for completion in alone)
    async with draft_server(draft, target) as worker:
        helped = await complete_all(worker, requests)
    assert answers(helped) == answers(alone)
