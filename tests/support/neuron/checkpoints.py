"""Tiny draft models for EAGLE, and tiny target models with Medusa heads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.models import save_tiny_model, tiny_model

HIDDEN_SIZE = 32


def save_eagle_draft(directory: Path, method: str) -> Path:
    """Save a tiny one-layer draft with the parameter names and shapes of an EAGLE checkpoint; return the directory.

    `method` is eagle or eagle3.
    """
    save_tiny_model(directory, "llama", seed=9, num_hidden_layers=1, tie_word_embeddings=False)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(9)
    if method == "eagle":
        del tensors["model.norm.weight"], tensors["model.layers.0.input_layernorm.weight"]
    else:
        for part in "qkv":  # of an embedding and a hidden state, side by side
            name = f"model.layers.0.self_attn.{part}_proj.weight"
            tensors[name] = torch.cat([tensors[name], tensors[name].flip(1)], 1).contiguous()
        tensors["model.layers.0.hidden_norm.weight"] = torch.ones(HIDDEN_SIZE)
    factor = 3 if method == "eagle3" else 2
    tensors["fc.weight"] = torch.randn(HIDDEN_SIZE, factor * HIDDEN_SIZE, generator=generator) * 0.1
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def save_medusa_target(directory: Path, *, num_heads: int, vocab_size: int = 288) -> Path:
    """Save a tiny target with Medusa heads, fitted to its greedy texts so that some guesses are right.

    The model is the same as `ModelDirectories.target`. The directory is returned.
    """
    save_tiny_model(directory, "llama", seed=1)
    model = tiny_model("llama", seed=1)
    texts = _greedy_texts(model, num_texts=60, num_tokens=40)
    with torch.no_grad():
        hidden = model(texts, output_hidden_states=True).hidden_states[-1]  # [num_texts, num_tokens, hidden_size]
    generator = torch.Generator().manual_seed(3)
    heads: dict[str, torch.Tensor] = {}
    for head in range(num_heads):
        weight, bias = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=generator) * 0.05, torch.zeros(HIDDEN_SIZE)
        ahead = head + 2  # the model itself gives the next token, the first head the one after it
        rows = (hidden + torch.nn.functional.silu(hidden @ weight.T + bias))[:, :-ahead].reshape(-1, HIDDEN_SIZE)
        wanted = torch.nn.functional.one_hot(texts[:, ahead:].reshape(-1), vocab_size).float()
        output = torch.linalg.lstsq(rows, wanted).solution.T.contiguous()
        layers = {"0.linear.weight": weight, "0.linear.bias": bias, "1.weight": output}
        heads |= {f"medusa_head_{head}.{name}": tensor for name, tensor in layers.items()}
    torch.save(heads, directory / "medusa_heads.pt")
    return directory


def _greedy_texts(model: PreTrainedModel, *, num_texts: int, num_tokens: int) -> torch.Tensor:
    prompts = torch.randint(2, 288, (num_texts, 2), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(prompts)
    texts: torch.Tensor = model.generate(
        prompts,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        pad_token_id=0,
    )
    return texts
