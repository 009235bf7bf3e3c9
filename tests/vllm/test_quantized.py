"""Test of a quantized model on vLLM: neither draft tokens nor a resumed answer change its tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from specdec.inference.config import ServerConfig
from specdec.inference.vllm.options import VllmModel
from tests.support.engine_contract import Drafting, completed, wanted
from tests.support.models import tiny_model, tiny_tokenizer
from tests.vllm.conftest import FLAGS

pytestmark = pytest.mark.release

SCHEME = {"num_bits": 8, "type": "int", "symmetric": True}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": {**SCHEME, "strategy": "channel", "dynamic": False},
            "input_activations": {**SCHEME, "strategy": "token", "dynamic": True},
        }
    },
}
"""Quantization in compressed-tensors' terms: 8-bit weights with a scale per output, 8-bit inputs with one per token."""


def save_quantized(folder: Path) -> Path:
    """Write a tiny model with 8-bit weights in the format of the library compressed-tensors."""
    import torch
    from safetensors.torch import save_file

    model = tiny_model("llama", seed=1, hidden_size=64, head_dim=32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].abs().amax(dim=1, keepdim=True) / 127
        weights[f"{name}_scale"] = scale
        weights[name] = (weights[name] / scale).round().to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    return folder


async def test_a_quantized_model_has_tokens_that_drafts_do_not_change(tmp_path: Path) -> None:
    from specdec.inference.serving.vllm_target import vllm_engine

    model = VllmModel(save_quantized(tmp_path / "model"), FLAGS, gamma=8)
    async with vllm_engine(model, ServerConfig(max_waiting=2)) as (held, _):
        for mode in ("greedy", "noise", "penalties of the output"):
            request = wanted(mode)
            tokens, _ = await completed(held.engine, request)
            drafted, commits = await completed(held.engine, request, Drafting(tokens, 0.3, random.Random(1)))
            assert drafted == tokens
            assert sum(commit.num_accepted_tokens for commit in commits) > 0
            assert (await completed(held.engine, request.resumed(tokens[:7])))[0] == tokens[7:]
