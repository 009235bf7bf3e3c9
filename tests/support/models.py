"""Tiny random models of every model family that the backends support, with thousands of parameters, and tokenizers.

Tests download nothing. Weights are drawn larger than Transformers draws them, so that logits are far apart and greedy
choices do not depend on rounding.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from specdec.inference.backends.onnx.shape import FAMILIES as PACKED_TYPES

TokenizerVariant: TypeAlias = Literal["plain", "permuted"]
"""plain: bytes and a few merges. permuted: the same tokens under other ids, as of an unrelated model."""

BOS_TOKEN, EOS_TOKEN = "<bos>", "<eos>"
BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1

MERGES = ("Ġ t", "h e", "Ġt he", "i n", "e r", "Ġ a", "o n", "Ġ s", "a t", "o r", "Ġ w", "n d", "Ġa nd", "in g")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"

NUM_TOKENIZER_IDS = 2 + 256 + len(MERGES)
DEFAULT_VOCAB_SIZE = 288

_GROUPED: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
_MULTI_HEAD = {**_GROUPED, "num_key_value_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

WINDOW = 5
"""Positions that a layer with a sliding window sees; few, so that test texts are longer."""
_SLIDING = {"sliding_window": WINDOW}
_MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    **_SLIDING,
}
_GEMMA = {**_GROUPED, **_MIXED, "head_dim": 12, "query_pre_attn_scalar": 10}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
_CAPPED = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0}
_LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}


def model_type(family: str) -> str:
    """Return Transformers' `model_type` for a key of `FAMILIES`: "mistral" for "mistral, windows"."""
    return family.partition(",")[0]


# family, perhaps with what it adds -> fields of its configuration
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": None},
    "mistral, windows": {**_GROUPED, **_SLIDING},
    "qwen2": _GROUPED,
    "qwen2, mixed layers": {**_GROUPED, **_MIXED, "use_sliding_window": True, "tie_word_embeddings": True},
    "qwen3": {**_GROUPED, "head_dim": 12},
    "qwen3, mixed layers": {**_GROUPED, **_MIXED, "use_sliding_window": True, "head_dim": 10},
    "qwen3_moe": {**_GROUPED, **_EXPERTS, "head_dim": 8},
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma": {**_GROUPED, "num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {**_GEMMA, **_CAPPED},
    "gemma3_text": _GEMMA,
    "gemma3": {"text_config": _GEMMA, "vision_config": _VISION, "image_token_id": DEFAULT_VOCAB_SIZE - 1},
    "gpt_oss": {**_GROUPED, **_MIXED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {
        **_GROUPED,
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "cohere": {**_GROUPED, "logit_scale": 0.25},
    "olmo2": _GROUPED,
    "olmo3": {**_GROUPED, **_MIXED},
    "phi3": {**_GROUPED, "partial_rotary_factor": 0.5},
    "phi3, windows": {**_GROUPED, **_SLIDING},
    "phi3, longrope": {
        **_MULTI_HEAD,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 128,
        "rope_scaling": _LONG_ROPE,
    },
    "smollm3": {**_GROUPED, "no_rope_layers": [1, 0]},
    "phi": {**_MULTI_HEAD, "partial_rotary_factor": 0.5},
    "gpt_neox": {**_MULTI_HEAD, "rotary_pct": 0.5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}


EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")
PACKED_FAMILIES = [family for family in FAMILIES if model_type(family) in (*PACKED_TYPES, "gemma3")]
CONTRACTS: dict[tuple[str, str], Collection[str]] = {
    ("torch", "float32"): FAMILIES,
    ("torch", "bfloat16"): [family for family in FAMILIES if family not in EXPERTS],  # ties go to other experts
    ("onnx", "float32"): PACKED_FAMILIES,
    ("onnx", "int8"): PACKED_FAMILIES,
}
"""Model families that the tests of backends run, by backend and dtype; docs/families.md is made from it."""


def tiny_model(
    family: str, *, vocab_size: int = DEFAULT_VOCAB_SIZE, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Return a model of a family with random weights, in float32 and in evaluation mode.

    Args:
        family: a key of `FAMILIES`.
        vocab_size: number of token ids.
        seed: seed of the weights; equal seeds give equal models.
        overrides: further fields of the model's configuration.
    """
    token_ids = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID}
    text = {**token_ids, "vocab_size": vocab_size, **overrides}
    fields = {**FAMILIES[family], **text}
    if "text_config" in fields:
        fields["text_config"] = {**fields["text_config"], **text}
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # attention sinks begin as random numbers
        config = AutoConfig.for_model(model_type(family), **fields)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    _randomize(model, seed)
    return model.eval()


def disturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Add small random numbers to a model's weights, in place; return the model.

    They are so small that the unchanged model as a target accepts some of the changed model's draft tokens.
    """
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.07 * parameter.std()
    return model


def save_tiny_model(
    directory: Path,
    family: str,
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    seed: int = 0,
    tokenizer_variant: TokenizerVariant = "plain",
    chat_template: str | None = None,
    **overrides: Any,
) -> Path:
    """Write a tiny model and its tokenizer to a directory, as a server loads them; return the directory.

    Raises:
        ValueError: `vocab_size` is smaller than the tokenizer's number of ids.
    """
    if vocab_size < NUM_TOKENIZER_IDS:
        raise ValueError(f"vocab_size {vocab_size} is below the tokenizer's {NUM_TOKENIZER_IDS} ids")
    tiny_model(family, vocab_size=vocab_size, seed=seed, **overrides).save_pretrained(directory)
    tokenizer = tiny_tokenizer(tokenizer_variant, chat_template)
    if overrides.get("eos_token_id", EOS_TOKEN_ID) != EOS_TOKEN_ID:
        tokenizer.eos_token = None  # it would end sequences, too
    tokenizer.save_pretrained(directory)
    return directory


def tiny_tokenizer(variant: TokenizerVariant = "plain", chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that encodes any text and decodes it back unchanged.

    The variant "permuted" has the same tokens as "plain", under other ids.

    Without a chat template, a server does not need to import Transformers, and starts in a third of the time.
    """
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    if variant == "permuted":
        tokens.reverse()
    vocabulary = {token: token_id for token_id, token in enumerate([BOS_TOKEN, EOS_TOKEN, *tokens])}
    merges = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS_TOKEN, EOS_TOKEN])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS_TOKEN, eos_token=EOS_TOKEN)
    fast.chat_template = chat_template
    return fast


def marked_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with the special token <|python_tag|>, which begins tool calls of Llama models."""
    fast = tiny_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    return fast


def _randomize(model: PreTrainedModel, seed: int) -> None:
    """Redraw every parameter: matrices at the scale that keeps activations near one, vectors near their old values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 2.0 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
