"""Weights of a Transformers decoder, renamed and laid out as the ONNX graph multiplies them.

Matrices are transposed to [in, out]. Those of query, key and value are joined into one. Heads are padded to `head_room`
elements. Rotary positions pair element i with element i + head_room / 2, so the padding follows each half of a head.
Constant factors of a model family become part of its matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specdec.inference.backends.onnx.shape import FAMILIES, DecoderShape, Weight


def decoder_weights(model: PreTrainedModel, shape: DecoderShape) -> Iterator[tuple[str, Weight]]:
    """Yield name and float32 array of each weight, one at a time, so that a large model is not in memory twice."""
    decoder: Any = model.get_decoder()
    config = decoder.config
    offset = FAMILIES[config.model_type].norm_offset
    embedding_scale = float(getattr(decoder.embed_tokens, "embed_scale", 1.0))
    embedding_scale *= getattr(config, "embedding_multiplier", 1.0)
    yield "embedding", _array(decoder.embed_tokens.weight, embedding_scale)  # [vocab_size, hidden_size]
    for index, layer in enumerate(decoder.layers):
        for name, weight in (*_matrices(layer, shape), *_norms(layer, shape, offset)):
            yield f"{name}_{index}", weight
    yield "final_norm", _array(decoder.norm.weight + offset)
    head: Any = model.get_output_embeddings()
    logit_scale = 1 / (getattr(config, "logits_scaling", 1.0) * (shape.logit_cap or 1.0))
    yield "head", _array(head.weight.T, logit_scale)  # [hidden_size, vocab_size]


def _matrices(layer: Any, shape: DecoderShape) -> Iterator[tuple[str, Weight]]:
    """Yield name, without the layer's number, and array of each matrix of a layer's linear layers, and of their biases.

    Args:
        layer: Transformers' module of the layer.
    """
    attention, mlp = layer.self_attn, layer.mlp
    yield "qkv", _array(_stacked(attention, "weight", shape).T)  # [hidden_size, query_size + 2 * kv_size]
    if "qkv" in shape.biases:
        yield "qkv_bias", _array(_stacked(attention, "bias", shape))
    for name, rows in zip(("gate", "up"), _gate_and_up(mlp), strict=True):
        yield name, _array(rows.T)
        if name in shape.biases:
            yield f"{name}_bias", _array(getattr(mlp, f"{name}_proj").bias)
    scale = getattr(layer, "residual_multiplier", 1.0)
    outputs = {"out": _pad_heads(attention.o_proj.weight.T, shape), "down": mlp.down_proj.weight.T}
    for (name, matrix), linear in zip(outputs.items(), (attention.o_proj, mlp.down_proj), strict=True):
        yield name, _array(matrix, scale)  # [query_size or intermediate_size, hidden_size]
        if name in shape.biases:
            yield f"{name}_bias", _array(linear.bias, scale)


def _norms(layer: Any, shape: DecoderShape, offset: float) -> Iterator[tuple[str, Weight]]:
    names = {}
    if shape.input_norms:
        before_mlp = "pre_feedforward_layernorm" if shape.output_norms else "post_attention_layernorm"
        names = {"attention_norm": "input_layernorm", "mlp_norm": before_mlp}
    if shape.output_norms:
        names |= {"out_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}
    for name, place in names.items():
        yield name, _array(getattr(layer, place).weight + offset)
    if shape.head_norms:
        yield "query_norm", _norm_of_padded(layer.self_attn.q_norm.weight + offset, shape)
        yield "key_norm", _norm_of_padded(layer.self_attn.k_norm.weight + offset, shape)


def _stacked(attention: Any, field: str, shape: DecoderShape) -> torch.Tensor:
    """Return the weights or biases of query, key and value as one array: [query_size + 2 * kv_size, ...].

    Args:
        attention: Transformers' module of a layer's attention.
        field: "weight" or "bias".
    """
    query, key, value = _projections(attention, field, shape)
    turned = [_pad_heads(_turned_halves(rows, shape), shape) for rows in (query, key)]
    return torch.cat([*turned, _pad_heads(value, shape)])


def _projections(attention: Any, field: str, shape: DecoderShape) -> Sequence[torch.Tensor]:
    if hasattr(attention, "qkv_proj"):
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        joint: torch.Tensor = getattr(attention.qkv_proj, field)
        return torch.split(joint, [number * shape.head_dim for number in heads])
    return [getattr(linear, field) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]


def _gate_and_up(mlp: Any) -> Sequence[torch.Tensor]:
    if hasattr(mlp, "gate_up_proj"):
        joint: torch.Tensor = mlp.gate_up_proj.weight
        return joint.chunk(2)
    return mlp.gate_proj.weight, mlp.up_proj.weight


def _turned_halves(rows: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """Reorder rows [num_heads * head_dim, ...]: those that rotary positions rotate begin each half of a head."""
    turned, rest = shape.rotary_dim // 2, (shape.head_dim - shape.rotary_dim) // 2
    if not rest:
        return rows
    heads = rows.reshape(-1, shape.head_dim, *rows.shape[1:])
    first, second, others, more = torch.split(heads, [turned, turned, rest, rest], dim=1)
    return torch.cat([first, others, second, more], dim=1).flatten(0, 1)


def _pad_heads(rows: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """Pad [num_heads * head_dim, ...] to [num_heads * head_room, ...] with zeros after each half of a head."""
    half, room = shape.head_dim // 2, shape.head_room // 2
    halves = rows.reshape(-1, half, *rows.shape[1:])
    padded = rows.new_zeros(halves.shape[0], room, *rows.shape[1:])
    padded[:, :half] = halves
    flat: torch.Tensor = padded.reshape(-1, *rows.shape[1:])
    return flat


def _norm_of_padded(weight: torch.Tensor, shape: DecoderShape) -> Weight:
    """Scale a norm's weight down for padded heads, whose zeros make the mean square smaller by head_dim / head_room."""
    padded = _pad_heads(_turned_halves(weight, shape), shape)
    return _array(padded, math.sqrt(shape.head_dim / shape.head_room))


def _array(tensor: torch.Tensor, scale: float = 1.0) -> Weight:
    array: Weight = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
    return array if scale == 1.0 else array * np.float32(scale)
