"""Random targets with nearly equal logits, and random draft heads for vLLM: EAGLE, EAGLE-3 and MTP.

With nearly equal logits, tokens follow from the sampler's random numbers alone. So the tokens of a random head are
accepted if they are drawn with the random numbers of the target.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

NUM_DRAFT_TOKENS = 128
"""Number of token ids that the EAGLE-3 head knows: every second one of the target's."""
AUX_LAYERS = [0, 1]
"""Numbers of the target's layers whose hidden states the EAGLE-3 head reads."""


FLATNESS = 0.05
"""Factor on the random output weights of target and head, so small that logits are nearly equal."""
SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 32}
"""Sizes of a tiny model that vLLM's attention supports on a CPU."""


def save_flat_target(folder: Path, family: str = "llama", **sizes: int) -> Path:
    """Save a target with nearly equal logits, and its tokenizer; return the folder.

    `family` and `sizes` are those of `tiny_model`.
    """
    import torch

    from tests.support.models import tiny_model, tiny_tokenizer

    model = tiny_model(family, seed=1, **SIZES | sizes)
    with torch.no_grad():
        model.lm_head.weight *= FLATNESS
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_head(folder: Path, method: str) -> Path:
    """Save a random draft head of one layer, `method` "eagle" or "eagle3"; return the folder."""
    import torch
    from safetensors.torch import save_file

    from tests.support.models import tiny_model

    model = tiny_model("llama", seed=7, num_hidden_layers=1, **SIZES)
    model.save_pretrained(folder)
    weights = {name.removeprefix("model."): each for name, each in model.state_dict().items() if "embed" not in name}
    draw, size = torch.Generator().manual_seed(8), model.config.hidden_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).mul(shape[-1] ** -0.5)

    config = json.loads((folder / "config.json").read_text())
    if method == "eagle":
        dropped = ("lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight")
        weights = {name: each for name, each in weights.items() if name not in dropped}
        weights["fc.weight"] = random(size, 2 * size)
    else:
        for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
            weights[name] = random(weights[name].shape[0], 2 * size)
        weights |= {"layers.0.hidden_norm.weight": torch.ones(size), "d2t": torch.arange(NUM_DRAFT_TOKENS)}
        weights |= {
            "fc.weight": random(size, len(AUX_LAYERS) * size),
            "lm_head.weight": random(NUM_DRAFT_TOKENS, size) * FLATNESS,
        }
        config |= {"draft_vocab_size": NUM_DRAFT_TOKENS}
        config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS}}
    save_file({name: each.contiguous() for name, each in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_mtp_layer(target: Path, folder: Path) -> Path:
    """Save a copy of a Qwen2 target as MiMo, which is Qwen2 and an MTP layer for one more token; return the folder."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, folder)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    draw, size = torch.Generator().manual_seed(8), config["hidden_size"]
    own, ones = "model.mtp_layers.0.", torch.ones(size)
    first = {name: each for name, each in weights.items() if name.startswith("model.layers.0.")}
    weights |= {own + name.removeprefix("model.layers.0."): each.clone() for name, each in first.items()}
    weights |= {own + name + "layernorm.weight": ones.clone() for name in ("token_", "hidden_", "final_")}
    weights[own + "input_proj.weight"] = torch.randn(size, 2 * size, generator=draw).mul(size**-0.5)
    save_file(weights, folder / "model.safetensors")
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
