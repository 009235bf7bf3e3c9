"""Exported form of a model: a folder that `from_pretrained` of transformers 4.57 and 5.x both read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from .tokenizer import BOS_ID, EOS_ID, PAD_ID, save_tokenizer

ROPE_THETA = 10000.0
KEPT_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "attention_bias", "attention_dropout", "mlp_bias", "tie_word_embeddings", "use_cache",
)  # fmt: skip


def portable_config(config: LlamaConfig, dtype: str) -> dict[str, object]:
    """Return a config with both spellings of renamed fields (`torch_dtype`/`dtype`, `rope_theta`/`rope_parameters`)."""
    fields: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    fields |= {name: getattr(config, name) for name in KEPT_FIELDS}
    fields |= {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    fields |= {"rope_theta": ROPE_THETA, "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}}
    return fields | {"torch_dtype": dtype, "dtype": dtype}


def export_model(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path, dtype: torch.dtype) -> None:
    """Write config, weights rounded to `dtype` (the tied output matrix once) and tokenizer to `directory`."""
    save_tokenizer(tokenizer, directory)
    name = str(dtype).removeprefix("torch.")
    _write(directory / "config.json", portable_config(model.config, name))
    generation: dict[str, object] = {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "do_sample": False,
    }
    _write(directory / "generation_config.json", generation)
    weights = {
        key: value.detach().to(dtype).contiguous()
        for key, value in model.state_dict().items()
        if key != "lm_head.weight"
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)


def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Load an exported model for inference, weights converted to `dtype`."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=dtype)
    return model.eval()


def _write(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
