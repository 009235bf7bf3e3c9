"""Weights of a Transformers decoder, renamed and laid out as the ONNX graph multiplies them.

Matrices are transposed to [in, out]. Those of query, key and value are joined into one. Heads are padded to `head_room`
elements. Rotary positions pair element i with element i + head_room / 2, so the padding follows each half of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from inference.backends.onnx.shape import DecoderShape, Weight


def decoder_weights(model: PreTrainedModel, shape: DecoderShape) -> Iterator[tuple[str, Weight]]:
    """Yield (name, float32 array) one at a time, so that a large model is not held twice."""
    decoder: Any = model.base_model
    yield "embedding", _array(decoder.embed_tokens.weight)  # [vocab_size, hidden_size]
    for index, layer in enumerate(decoder.layers):
        for name, weight in _layer_weights(layer, shape):
            yield f"{name}_{index}", weight
    yield "final_norm", _array(decoder.norm.weight)
    head: Any = model.get_output_embeddings()
    yield "head", _array(head.weight.T)  # [hidden_size, vocab_size]


def _layer_weights(layer: Any, shape: DecoderShape) -> Iterator[tuple[str, Weight]]:
    attention, mlp = layer.self_attn, layer.mlp
    yield "attention_norm", _array(layer.input_layernorm.weight)
    yield "qkv", _array(_stacked(attention, "weight", shape).T)  # [hidden_size, query_size + 2 * kv_size]
    if "qkv" in shape.biases:
        yield "qkv_bias", _array(_stacked(attention, "bias", shape))
    if shape.normalizes_heads:
        yield "query_norm", _array(_norm_of_padded(attention.q_norm.weight, shape))
        yield "key_norm", _array(_norm_of_padded(attention.k_norm.weight, shape))
    yield "out", _array(_pad_heads(attention.o_proj.weight.T, shape))  # [query_size, hidden_size]
    yield "mlp_norm", _array(layer.post_attention_layernorm.weight)
    linears = {"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
    for name, linear in linears.items():
        yield name, _array(linear.weight.T)
    for name, linear in {"out": attention.o_proj, **linears}.items():
        if name in shape.biases:
            yield f"{name}_bias", _array(linear.bias)


def _stacked(attention: Any, field: str, shape: DecoderShape) -> torch.Tensor:
    """Weights or biases of query, key and value: [query_size + 2 * kv_size, ...]."""
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    return torch.cat([_pad_heads(getattr(linear, field), shape) for linear in linears])


def _pad_heads(rows: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """[num_heads * head_dim, ...] -> [num_heads * head_room, ...], zeros after each half of a head."""
    half, room = shape.head_dim // 2, shape.head_room // 2
    halves = rows.reshape(-1, half, *rows.shape[1:])
    padded = rows.new_zeros(halves.shape[0], room, *rows.shape[1:])
    padded[:, :half] = halves
    flat: torch.Tensor = padded.reshape(-1, *rows.shape[1:])
    return flat


def _norm_of_padded(weight: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """The mean over head_room elements is too small by head_dim / head_room; the weight makes up for it."""
    return _pad_heads(weight, shape) * math.sqrt(shape.head_dim / shape.head_room)


def _array(tensor: torch.Tensor) -> Weight:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())
