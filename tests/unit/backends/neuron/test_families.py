"""Each family on backend neuron gives Transformers' logits and tokens; settings that NxDI would ignore are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.inference.backends.neuron.backend import load_neuron_backend
from specdec.inference.backends.neuron.graphs.application import FAMILIES
from specdec.inference.errors import UnsupportedModelError
from specdec.inference.model.slots import Span
from tests.support.models import save_tiny_model
from tests.support.neuron.engines import generate_all, greedy_reference, requests
from tests.support.neuron.slot_models import GAMMA, neuron_config
from tests.unit.backends.neuron.test_fused import engine, load

pytestmark = pytest.mark.usefixtures("on_real")

TOKENS = tuple(range(20, 44))
FIELDS: dict[str, dict[str, Any]] = {"qwen3_moe": {"norm_topk_prob": True}}
"""Fields of config.json by family, as published checkpoints have them, where Transformers' defaults differ."""


def save(directory: Path, family: str, *, seed: int = 0, **fields: Any) -> Path:
    return save_tiny_model(directory, family, seed=seed, **{**FIELDS.get(family, {}), **fields})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("family", "fields"), [*((family, {}) for family in FAMILIES), ("llama", {"rope_scaling": LLAMA3})]
)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    """The neuron backend's logits equal those of Transformers, for prompts and for passes over draft tokens."""
    path = save(tmp_path, family, **fields)
    backend = load_neuron_backend(neuron_config(path))
    spans = [Span(2, 0, TOKENS[:7], 1), Span(0, 0, TOKENS[3:4], 1)]
    prompts = backend.forward(spans)
    passes = backend.forward([Span(2, 7, TOKENS[7:11], GAMMA + 1), Span(0, 1, TOKENS[4:6], 2)])
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        one, other = (model(torch.tensor([tokens])).logits[0].numpy() for tokens in (TOKENS[:11], TOKENS[3:6]))
    np.testing.assert_allclose(prompts, [one[6], other[0]], rtol=0, atol=1e-3)
    np.testing.assert_allclose(passes, [*one[7:], *other[1:]], rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_fused_pair_gives_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    target, draft = save(tmp_path / "target", family, seed=1), save(tmp_path / "draft", family, seed=2)
    wanted = requests(4, seed=4, sampled=False)
    answers = await generate_all(engine(load(target, draft)), wanted)
    assert [token_ids for token_ids, _ in answers] == greedy_reference(target, wanted)


LEFT_OUT: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is false"),
    ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}, "some layers have no experts"),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "is of type yarn, which NxDI does not read"),
]


@pytest.mark.parametrize(("family", "fields", "message"), LEFT_OUT)
def test_settings_that_nxdi_leaves_out_are_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    """A checkpoint with a setting that NxDI ignores is refused, since NxDI would compute another model."""
    path = save(tmp_path, family, norm_topk_prob=True) if family == "qwen3_moe" else save(tmp_path, family)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(UnsupportedModelError, match=message):
        load_neuron_backend(neuron_config(path))


def test_a_transformers_5_checkpoint_keeps_its_rope(tmp_path: Path) -> None:
    """A checkpoint with rope_theta in rope_parameters, as Transformers 5 saves it, is refused if NxDI ignores that."""
    path = save(tmp_path, "llama")
    file = path / "config.json"
    fields = json.loads(file.read_text())
    del fields["rope_theta"]
    file.write_text(json.dumps({**fields, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}))
    with pytest.raises(UnsupportedModelError, match=r"rope_theta is 10000.*, in rope_parameters 500000.0"):
        load_neuron_backend(neuron_config(path))
