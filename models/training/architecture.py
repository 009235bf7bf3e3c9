"""Shapes of the two models, and the attention kernel for training."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from inference.backends.host import instruction_sets

from .tokenizer import BOS_ID, EOS_ID, MAX_LENGTH, PAD_ID, VOCABULARY_SIZE

TRAINING_ATTENTION = "matmul_causal"
BIG_NEGATIVE = -1e4
# Where the processor has no bfloat16 unit, bfloat16 is emulated and takes 2.5 times as long as float32.
HAS_BFLOAT16 = "bf16" in instruction_sets()
FAST_DTYPE = torch.bfloat16 if HAS_BFLOAT16 else torch.float32


def _config(hidden: int, layers: int, heads: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        rms_norm_eps=1e-5,
    )


def target_config() -> LlamaConfig:
    """Return a deep and narrow shape: a step's time grows with depth, and the draft must be much faster."""
    return _config(hidden=288, layers=12, heads=4, intermediate=768)


def draft_config() -> LlamaConfig:
    """Return a shape of two layers, the fewest that can copy from context (induction)."""
    return _config(hidden=160, layers=2, heads=4, intermediate=432)


def _matmul_causal(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention by three bfloat16 matrix products; tensors are (batch, heads, length, head size).

    On a CPU with bfloat16 matrix units this is twice as fast, backward included, as the fused kernel.
    """
    batch, heads, length, size = query.shape
    with torch.autocast("cpu", enabled=False):
        q, k, v = (part.to(torch.bfloat16).reshape(batch * heads, length, size) for part in (query, key, value))
        mask = torch.full((length, length), BIG_NEGATIVE, dtype=torch.bfloat16).triu(1)
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scaling or size**-0.5)
        mixed = torch.bmm(torch.softmax(scores, -1), v)
    return mixed.view(batch, heads, length, size).transpose(1, 2).contiguous(), None


def new_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Build a freshly initialised float32 model, ready for training."""
    torch.manual_seed(seed)
    return use_training_attention(LlamaForCausalLM(config))


def use_training_attention(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Let `model` compute whole rows with `_matmul_causal` where bfloat16 is fast; return it."""
    if not HAS_BFLOAT16:
        return model
    AttentionInterface.register(TRAINING_ATTENTION, _matmul_causal)
    model.set_attn_implementation(TRAINING_ATTENTION)
    return model


def logits_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits (rows, length, vocabulary) of int64 `tokens` (rows, length), by fast bfloat16 if available."""
    with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def parameter_count(model: torch.nn.Module) -> int:
    """Return the number of parameters, tied embeddings counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
