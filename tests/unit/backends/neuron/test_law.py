"""Tokens that the device samples have the target's distribution at the request's temperature and top_k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.inference.backends.neuron.decoders.graph_decoder import GraphDecoder
from specdec.inference.model.decoder import Turn
from specdec.inference.request import SamplingParams
from tests.conftest import ModelDirectories
from tests.support.law import exact_distribution, g_test
from tests.support.neuron.checkpoints import save_eagle_draft
from tests.unit.backends.neuron import test_device_target, test_fused

pytestmark = pytest.mark.usefixtures("on_real")

SAMPLING = SamplingParams(temperature=8.0, top_k=2)
PROMPT = (5, 6, 7)
NUM_TOKENS = 3
NUM_ROUNDS = 100  # of three sequences


def law(target: Path) -> dict[tuple[int, ...], float]:
    """Return the probability of every output of NUM_TOKENS tokens after PROMPT, computed from the target's logits."""
    model = AutoModelForCausalLM.from_pretrained(target)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in found.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
            shares = exact_distribution(logits.tolist(), SAMPLING)
            longer |= {(*tokens, int(token)): probability * shares[token] for token in shares.nonzero()[0]}
        found = longer
    return found


def sampled(decoder: GraphDecoder) -> list[tuple[int, ...]]:
    """Continue PROMPT in each slot of the decoder; return the first NUM_TOKENS new tokens of each slot."""
    sequences, starts = [list(PROMPT) for _ in range(decoder.num_slots)], [0] * decoder.num_slots
    while pending := [slot for slot, tokens in enumerate(sequences) if len(tokens) < len(PROMPT) + NUM_TOKENS]:
        turns = [Turn(slot, starts[slot], list(sequences[slot]), SAMPLING, gamma=test_fused.K) for slot in pending]
        for turn, verdict in zip(turns, decoder.step(turns), strict=True):
            starts[turn.slot] = len(turn.token_ids) + len(verdict.token_ids) - 1
            sequences[turn.slot] += verdict.token_ids
    return [tuple(tokens[len(PROMPT) :][:NUM_TOKENS]) for tokens in sequences]


def target_alone(models: ModelDirectories, _: Path) -> GraphDecoder:
    return test_device_target.load(models.target)


def eagle(models: ModelDirectories, folder: Path) -> GraphDecoder:
    return test_fused.load(models.target, save_eagle_draft(folder / "eagle", "eagle"), method="eagle")


@pytest.mark.parametrize("load", [target_alone, pytest.param(eagle, marks=pytest.mark.long)])
def test_sampled_tokens_have_the_targets_law(
    models: ModelDirectories, tmp_path: Path, load: Callable[[ModelDirectories, Path], GraphDecoder]
) -> None:
    torch.manual_seed(1)
    decoder, expected = load(models, tmp_path), law(models.target)
    counts = Counter(tokens for _ in range(NUM_ROUNDS) for tokens in sampled(decoder))
    assert counts.keys() <= expected.keys()
    observed = np.array([counts[tokens] for tokens in expected])
    assert g_test(observed, np.array(list(expected.values()))) > 1e-3
