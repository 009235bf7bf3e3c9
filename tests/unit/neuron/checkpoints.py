"""Checkpoints that are no plain model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import save_tiny_model

HIDDEN_SIZE = 32


def save_eagle_draft(directory: Path, method: str) -> Path:
    """A draft of one layer with the keys of an EAGLE checkpoint."""
    save_tiny_model(directory, "llama", seed=9, num_hidden_layers=1, tie_word_embeddings=False)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    if method == "eagle":
        del tensors["model.norm.weight"], tensors["model.layers.0.input_layernorm.weight"]
    factor = 3 if method == "eagle3" else 2
    tensors["fc.weight"] = torch.zeros(HIDDEN_SIZE, factor * HIDDEN_SIZE)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory
