"""Conversion of a checkpoint to a GGUF file, which llama.cpp reads.

It supports Llama models with a byte-level BPE tokenizer, whose pre-tokenizer becomes PRE_TOKENIZER. llama.cpp's own
converter knows tokenizers by a hash of their output, and refuses the bundled one. The package `gguf` is the one in
llama.cpp's sources.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

PRE_TOKENIZER = "starcoder"
"""llama.cpp's pre-tokenizer that is nearest to the bundled one: it splits digits alike, but contractions otherwise."""

Q8_BLOCK = 32
"""Number of weights in a block of the type q8_0, which share a scale."""

LAYER_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(checkpoint: str, file: Path, *, dtype: str) -> None:
    """Convert a checkpoint to a GGUF file; `dtype` is "float32", or "int8" for llama.cpp's type q8_0.

    The end-of-sequence token in the file is one that is never generated, so that llama.cpp never ends an answer early.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if dtype == "int8" else gguf.LlamaFileType.ALL_F32)
    _write_settings(writer, model.config)
    _write_tokenizer(writer, Path(checkpoint), model.config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored = _as_stored(name, tensor, model.config).contiguous().numpy()
        kind = stored_type(stored.shape, dtype)
        writer.add_tensor(_tensor_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_type(shape: Sequence[int], dtype: str) -> gguf.GGMLQuantizationType:
    """Return the type for a tensor, as `llama-quantize` chooses it: float16 if rows cannot be divided into blocks."""
    if dtype == "float32" or len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.F16 if shape[-1] % Q8_BLOCK else gguf.GGMLQuantizationType.Q8_0


def _write_settings(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, num_tokens: int) -> None:
    tokenizer: dict[str, Any] = json.loads((checkpoint / "tokenizer.json").read_text())
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(ids | special, key=(ids | special).__getitem__)
    tokens += [f"<unused{index}>" for index in range(len(tokens), num_tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    config = json.loads((checkpoint / "config.json").read_text())
    writer.add_bos_token_id(config["bos_token_id"])
    padding = config["pad_token_id"]  # never generated; without any end, llama.cpp assumes token 11
    writer.add_eos_token_id(num_tokens - 1 if padding is None else padding)
    writer.add_add_bos_token(True)


def _tensor_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer:
        return outer[name]
    if name == "lm_head.weight":
        return "output.weight"
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_TENSORS[rest.removesuffix('.weight')]}.weight"


def _as_stored(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Return a checkpoint's tensor with its rows in the order that llama.cpp expects.

    Only projections of queries and keys change: llama.cpp's rotary embedding pairs neighbouring rows of a head, not
    the rows of its two halves.
    """
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if num_heads is None:
        return tensor
    halves = tensor.reshape(num_heads, 2, config.head_dim // 2, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape)
