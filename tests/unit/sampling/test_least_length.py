"""min_new_tokens gives end-of-sequence tokens the probability 0 until that many tokens are generated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.request import GenerationRequest, MinLengthSampling, SamplingParams
from specdec.inference.sampling.choice import choose_tokens, rank_tokens
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from tests.support.answers import commits_of
from tests.support.models import tiny_model

LOGITS = np.array([[9.0, 1.0, 8.0, 2.0]] * 2, dtype=np.float32)
EOS = frozenset(range(0, 288, 2))
"""End-of-sequence ids: half of the vocabulary, so that without min_new_tokens no output is long by chance."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends_are_held_back_below_the_position_alone(temperature: float) -> None:
    held = MinLengthSampling(temperature, seed=3, held_back=(0, 2, 999), until=8)
    for logits in (LOGITS, torch.from_numpy(LOGITS)):
        early, late = choose_tokens(logits, [held, held], [7, 8])
        free = choose_tokens(logits, [SamplingParams(temperature, seed=3)] * 2, [7, 8])
        assert early in (1, 3)
        assert late == free[1]
        ((best, _), (second, _)), _ = rank_tokens(logits, [held, held], [7, 8], count=2)
        assert {best, second} == {1, 3}


def test_ends_are_held_back_until_the_least_length() -> None:
    request = GenerationRequest((5, 6, 7), stop_token_ids=frozenset({9}), stop_at_eos=True, min_new_tokens=4)
    law = request.effective_sampling(frozenset({2}))
    assert law == MinLengthSampling(held_back=(2, 9), until=7)
    assert request.resumed((8, 8)).effective_sampling(frozenset({2})) == law, "a resume keeps it"
    ignoring = GenerationRequest((5,), stop_token_ids=frozenset({9}), min_new_tokens=4).effective_sampling(
        frozenset({2})
    )
    assert ignoring == MinLengthSampling(held_back=(9,), until=5)
    assert GenerationRequest((5,), stop_at_eos=True).effective_sampling(frozenset({2})) == SamplingParams()


def backend() -> TorchBackend:
    return TorchBackend(tiny_model("llama", seed=1), num_slots=1, max_length=40)


async def output_of(engine: TargetEngine, request: GenerationRequest) -> tuple[list[int], int]:
    """Return the tokens of a request, and its number of accepted draft tokens."""
    engine.start()
    commits = await commits_of(engine.generate(request))
    await engine.stop()
    return [each for c in commits for each in c.token_ids], sum(c.num_accepted_tokens for c in commits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_draft_keeps_the_law_too(temperature: float) -> None:
    """With min_new_tokens, a draft changes no token; it too leaves out end tokens, so its tokens are accepted."""
    limits = EngineLimits(gamma=4, eos_token_ids=EOS)
    sampling = SamplingParams(temperature, seed=5)
    for least in (0, 1, 7, 12):
        request = GenerationRequest((3, 4, 5), sampling, 12, stop_at_eos=True, gamma=4, min_new_tokens=least)
        alone, _ = await output_of(TargetEngine(SlotDecoder(backend()), limits), request)
        proposer = ModelProposer(backend())
        decoder = SpeculativeDecoder(SlotDecoder(backend()), proposer)
        drafted, num_accepted = await output_of(TargetEngine(decoder, limits), request)
        assert drafted == alone
        assert len(alone) >= max(1, least)
        assert not EOS & set(alone[:least])
        if least == 12:
            assert num_accepted >= 8, "its guesses hold the same tokens back"
