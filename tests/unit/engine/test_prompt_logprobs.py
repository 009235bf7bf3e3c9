"""A prompt's log-probabilities are those of one forward over it, whether it is read whole, in parts or again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest
import torch

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.commit import TokenLogprobs
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.model.decoder import Decoder, Turn, Verdict
from specdec.inference.request import GenerationRequest
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from tests.support.answers import opened_and_commits
from tests.support.models import tiny_model

PROMPT = tuple(range(10, 33))


def decoders() -> dict[str, Decoder]:
    model = tiny_model("llama", seed=1)
    target = SlotDecoder(TorchBackend(model, num_slots=3, max_length=60))
    proposer = ModelProposer(TorchBackend(tiny_model("llama", seed=2), num_slots=3, max_length=60))
    return {"alone": target, "drafted": SpeculativeDecoder(target, proposer)}


async def scores_of(engine: TargetEngine, request: GenerationRequest) -> tuple[list[int], tuple[TokenLogprobs, ...]]:
    opened, commits = await opened_and_commits(engine.generate(request))
    return [token_id for commit in commits for token_id in commit.token_ids], opened.prompt_logprobs


@pytest.mark.parametrize("chunk", [3, 22, 256])
@pytest.mark.parametrize("name", ["alone", "drafted"])
async def test_they_are_those_of_one_forward(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.inference.engine.batching.MAX_PART_TOKENS", chunk)
    async with running(TargetEngine(decoders()[name], EngineLimits(gamma=3))) as engine:
        asked = GenerationRequest(PROMPT, max_new_tokens=6, logprobs=1, prompt_logprobs=2)
        tokens, scores = await scores_of(engine, asked)
        plain, nothing = await scores_of(engine, GenerationRequest(PROMPT, max_new_tokens=6))
        _, resumed = await scores_of(engine, asked.resumed((40, 41)))
    assert (tokens, nothing, resumed) == (plain, (), ())
    with torch.no_grad():
        rows = torch.log_softmax(tiny_model("llama", seed=1)(torch.tensor([PROMPT])).logits[0].double(), dim=-1)
    assert [each.token_ids[0] for each in scores] == list(PROMPT[1:])
    for position, each in enumerate(scores):
        assert each.logprobs[0] == pytest.approx(float(rows[position, PROMPT[position + 1]]), abs=1e-4)
        best = rows[position].topk(2)
        assert list(each.logprobs[1:]) == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("failing", [2, 5, 8, 9])
async def test_a_prompt_that_is_read_again_is_scored_once(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is read again after a failed pass has one score per token.

    Pass number `failing` is the one that fails.

    Regression: a pass within or after a prompt of 600 tokens failed, and the client got 855 scores.
    """
    monkeypatch.setattr("specdec.inference.engine.batching.MAX_PART_TOKENS", 3)
    decoder = decoders()["alone"]
    step, passes = decoder.step, itertools.count(1)

    def flickers(turns: Sequence[Turn]) -> list[Verdict]:
        if next(passes) == failing:
            raise RuntimeError("flicker")
        return step(turns)

    monkeypatch.setattr(decoder, "step", flickers)
    async with running(TargetEngine(decoder)) as engine:
        _, scores = await scores_of(engine, GenerationRequest(PROMPT, max_new_tokens=6, prompt_logprobs=2))
    assert [each.token_ids[0] for each in scores] == list(PROMPT[1:])


async def test_others_in_the_same_pass_are_not_touched() -> None:
    async with running(TargetEngine(decoders()["alone"])) as engine:
        requests = [
            GenerationRequest(PROMPT[start:], max_new_tokens=5, prompt_logprobs=each)
            for start, each in ((0, 0), (3, None), (5, 1))
        ]
        together = await asyncio.gather(*(scores_of(engine, request) for request in requests))
        alone = [await scores_of(engine, request) for request in requests]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    assert [len(scores) for _, scores in together] == [22, 0, 17]
