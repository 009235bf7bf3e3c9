"""A public fp8 checkpoint, as docs/tutorials uses it for the 405B model, is rescaled and loaded by NxDI's own code.

The checkpoint is a tiny Llama in the format of compressed-tensors, with the settings of configs/: all MLPs but those of
the first and the last layer are quantized. Logits are compared with those of Transformers, which gets the numbers that
weights and scales stand for.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdec.inference.backends.neuron.backend import load_neuron_backend
from specdec.inference.backends.neuron.checkpoints.rescaling import rescale
from specdec.inference.config import ROOT
from specdec.inference.model.slots import Span
from tests.support.models import save_tiny_model
from tests.support.neuron.engines import generate_all, greedy_reference, requests
from tests.support.neuron.slot_models import neuron_config
from tests.unit.backends.neuron.test_fused import engine, load

NUM_LAYERS, LAST_OF_405B = 4, 125
IDS = (5, 6, 7, 40, 41, 200, 9)
CONFIG = ROOT / "configs" / "llama3.1-405b-fp8_llama3.2-1b_trn2.toml"
TAKEN = (
    *("fused_qkv", "quantized", "quantization_dtype", "quantization_type"),
    *("modules_to_not_convert", "draft_model_modules_to_not_convert"),
)
"""Names of the settings that the tests take from CONFIG: all but those of kernels, sizes and cores."""


def is_quantized(name: str) -> bool:
    parts = name.split(".")
    return ".mlp." in name and 0 < int(parts[2]) < NUM_LAYERS - 1


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def public(folder: Path) -> Path:
    """Save a tiny fp8 checkpoint in the public format: each quantized row's largest value is 448, e4m3's maximum."""
    path = save_tiny_model(folder, "llama", num_hidden_layers=NUM_LAYERS)
    tensors = {}
    for name, weight in load_file(path / "model.safetensors").items():
        tensors[name] = weight
        if is_quantized(name):
            scale = weight.abs().amax(1, keepdim=True) / 448
            tensors |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    config = json.loads((path / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"0": group}}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return saved(path, tensors)


@pytest.fixture(scope="module")
def rescaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    list(rescale(public(folder / "public"), folder / "rescaled"))
    return folder / "rescaled"


def dequantized(checkpoint: Path, folder: Path) -> Path:
    """Save a float32 copy of a quantized checkpoint, which Transformers can load, in the new `folder`; return that."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(checkpoint / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale")}
    return saved(folder, {name: it.float() * scales.get(f"{name}_scale", 1) for name, it in tensors.items()})


def logits_of(model: Path) -> np.ndarray[Any, Any]:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.asarray(reference(torch.tensor([IDS])).logits[0])


def settings(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    """Return {"overrides": fields}: `TAKEN` of CONFIG, adapted to `NUM_LAYERS` layers, and updated by `changes`.

    Args:
        checkpoint: the folder of the rescaled weights, for quantized_checkpoints_path.
        changes: fields of NxDI's NeuronConfig.
    """
    values = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["neuron_config"]
    found = {name: values[name] for name in TAKEN}
    found["modules_to_not_convert"] = [
        name.replace(f"layers.{LAST_OF_405B}.mlp", f"layers.{NUM_LAYERS - 1}.mlp")
        for name in found["modules_to_not_convert"]
    ]
    return {"overrides": {**found, "quantized_checkpoints_path": str(checkpoint), **changes}}


@pytest.mark.usefixtures("on_real")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_nxdi_computes_what_the_public_checkpoint_stands_for(
    rescaled: Path, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    """NxDI's logits for the rescaled checkpoint equal Transformers' for the rescaled and for the public checkpoint.

    Rescaling halves the fp8 values, which is exact here, since none is near 0. The tolerances fit logits of up to 10;
    scales stay in float32, also for a model in bfloat16.
    """
    backend = load_neuron_backend(replace(neuron_config(rescaled, **settings(rescaled)), dtype=dtype))
    found = np.asarray(backend.forward([Span(0, 0, IDS, len(IDS))]))
    for name in ("rescaled", "public"):
        expected = logits_of(dequantized(rescaled.parent / name, tmp_path / name))
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=tolerance)


@pytest.mark.usefixtures("on_real")
async def test_a_fused_pair_answers_as_the_rescaled_target(rescaled: Path, tmp_path: Path) -> None:
    draft = save_tiny_model(tmp_path / "draft", "llama", seed=2)
    wanted = requests(3, seed=4, sampled=False)
    answers = await generate_all(engine(load(rescaled, draft, **settings(rescaled))), wanted)
    target = dequantized(rescaled, tmp_path / "float")
    assert [token_ids for token_ids, _ in answers] == greedy_reference(target, wanted)


def test_the_walk_leaves_out_what_the_public_checkpoint_does() -> None:
    """The list of layers not to quantize has the attention of all 126 layers, and the MLPs of the first and last."""
    values = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["neuron_config"]
    attention = {f"layers.{layer}.self_attn" for layer in range(LAST_OF_405B + 1)}
    assert set(values["modules_to_not_convert"]) == {
        "lm_head",
        "layers.0.mlp",
        f"layers.{LAST_OF_405B}.mlp",
        *attention,
    }
