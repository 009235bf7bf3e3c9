"""The ONNX graph of a Llama-shaped decoder over slots.

Linear layers run over the flattened tokens of all spans. Attention runs place by place. A place is one span, or in
float32 a run, which is single tokens of sequences in neighbouring slots. Each place has its own keys and values, to
whose memory the operator writes the new ones. (ONNX Runtime's operator takes several sequences only if each has one new
token.)

In int8 attention gets a spare token after those of each span, and its result is dropped. Without it a span of one
token would be a matrix of one row, which ONNX Runtime multiplies by another kernel. That one adds in another order, and
a difference in the last bit can move the next layer's input by one of its 255 steps. With the spare token a token's
logits are the same bits in every pass. In float32 the last bit matters only to logits that tie to 1e-5, and the spare
token costs 8 % of a pass of the bundled models; only `--exact always` adds it. With spare tokens places are spans.

Inputs of a graph with N places, for T tokens of B sequences, of which R tokens are to have logits:
    token_ids  int64 [1, T]; [B, T / B] if N = 1
    lasts      int32 [B]: last position that each sequence attends to
    lengths    int32 [N]: one more than the highest of a place's `lasts`
    rows       int64 [R]: tokens that are to have logits
    key_L_P, value_L_P  float32 [sequences of P, num_kv_heads, room, head_room] of layer L and place P
Only if N > 1:
    widths     int64 [N]: tokens of each place; their sum is T, with the spare ones T + N
    Without spare tokens: shapes int64 [3 N]: sequences of each place, tokens of each sequence, elements of a token
             counts int64 [N]: sequences of each place; their sum is B
Only with spare tokens:
    spread     int64 [T + N]: tokens, each span's last one twice: its keys stand for the spare token's
    own        int64 [T]: which of the T + N tokens are not spare
Outputs: logits float32 [1, R, vocab_size]; new_key_L_P and new_value_L_P, to be bound to the memory of their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from specdec.inference.backends.onnx import int8 as onnx_int8
from specdec.inference.backends.onnx.shape import ACTIVATIONS, DecoderShape, Rotary, Weight

# Released with ONNX 1.14; every operator here is older, and newer runtimes read it.
IR_VERSION, OPSET = 9, 18
CONTRIB = "com.microsoft"  # operators that ONNX Runtime itself brings, versioned with it

CONSTANTS = {
    *("cosines", "sines", "qkv_sizes", "heads_shape", "flat_shape", "logit_cap", "flat_hidden", "flat_attended"),
    *onnx_int8.CONSTANTS,
}
"""Names, without a number at the end, of the constants that each graph has beside the weights, as initializers."""


def is_constant(name: str) -> bool:
    """Return whether an initializer is a constant of the graph, not a weight."""
    return name.rstrip("_0123456789") in CONSTANTS


def cache_names(layer: int, place: int) -> tuple[str, str]:
    """Return the names of the graph's inputs for the keys and the values of a layer, for one place (see `Place`).

    The outputs to which new keys and values are written have the same names after `new_`.
    """
    return f"key_{layer}_{place}", f"value_{layer}_{place}"


class DecoderGraph:
    """Builder of a decoder's ONNX graph; each private method adds nodes and returns the name of their result.

    `benchmarks.framework` overrides all that is neither a matrix product nor attention, to measure its cost.

    Args:
        dtype: arithmetic of the linear layers, "float32" or "int8".
        num_places: number of places of a pass (groups of sequences that attend together, see `Place`), >= 1.
        room: positions of a slot, one of them for the spare token.
        has_spare: whether spans get a spare token in float32 too, so that logits do not depend on the other spans.
    """

    def __init__(self, shape: DecoderShape, dtype: str, num_places: int, room: int, *, has_spare: bool = False) -> None:
        self._shape = shape
        self._is_int8 = dtype == "int8"
        self._has_spare = has_spare or self._is_int8
        self._quantized: set[str] = set()  # activations that are quantized already
        self._places = range(num_places)
        self._room = room
        self._nodes: list[onnx.NodeProto] = []

    def build(self, weights: Iterable[onnx.TensorProto]) -> onnx.ModelProto:
        """Return the graph over weights that `weights.py` and `int8.py` name, and that usually refer to a file."""
        self._parts()
        self._decoder()
        graph = helper.make_graph(
            self._nodes, "decoder", self._inputs(), self._outputs(), [*weights, *self._constants()]
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)

    def _add(self, operator: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        self._nodes.append(helper.make_node(operator, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def _decoder(self) -> None:
        residual = self._add("Gather", ["embedding", "token_ids"], ["embedded"])  # [1, T, hidden_size]
        hidden = residual
        if self._shape.input_norms:
            hidden = self._rms_norm(residual, "attention_norm_0", "attention_input_0", self._shape.rms_eps)
        for layer in range(self._shape.num_layers):
            hidden, residual = self._layer(layer, hidden, residual)
        if len(self._places) == 1 and not self._has_spare:  # may be a run: [B, 1, hidden_size]
            hidden = self._add("Reshape", [hidden, "flat_hidden"], ["hidden_of_all"])
        last = self._add("Gather", [hidden, "rows"], ["last"], axis=1)  # [1, R, hidden_size]
        if not self._shape.logit_cap:
            self._multiply(last, "head", "logits")
            return
        share = self._multiply(last, "head", "uncapped")  # of the cap, by which the head is divided
        self._add("Mul", [self._add("Tanh", [share], ["capped"]), "logit_cap"], ["logits"])

    def _layer(self, layer: int, hidden: str, residual: str) -> tuple[str, str]:
        """Add one layer; return the names of the next layer's normalized input and of the residual stream.

        Args:
            hidden, residual: the same names for this layer, as the one before returned them.
        """
        qkv = self._linear("qkv", layer, hidden)
        if self._shape.head_norms:
            qkv = self._normalize_heads(layer, qkv)
        attended = self._attention(layer, qkv)
        hidden, residual = self._project_and_norm(
            "out", layer, attended, residual, self._input_norm(f"mlp_norm_{layer}")
        )
        gate = self._linear("gate", layer, hidden)
        up = self._linear("up", layer, hidden)
        product = self._activate(layer, gate, up)
        is_last = layer + 1 == self._shape.num_layers
        next_norm = "final_norm" if is_last else self._input_norm(f"attention_norm_{layer + 1}")
        return self._project_and_norm("down", layer, product, residual, next_norm)

    def _input_norm(self, name: str) -> str:
        return name if self._shape.input_norms else ""

    def _activate(self, layer: int, gate: str, up: str) -> str:
        operator, attributes = ACTIVATIONS[self._shape.activation]
        gate = self._add(operator, [gate], [f"active_{layer}"], CONTRIB, **attributes)
        return self._add("Mul", [gate, up], [f"gated_{layer}"])

    def _linear(self, name: str, layer: int, hidden: str) -> str:
        product = self._multiply(hidden, f"{name}_{layer}", f"{name}_output_{layer}")
        if name not in self._shape.biases:
            return product
        return self._add("Add", [product, f"{name}_bias_{layer}"], [f"{name}_biased_{layer}"])

    def _multiply(self, hidden: str, weight: str, output: str) -> str:
        if not self._is_int8:
            return self._add("MatMul", [hidden, weight], [output])
        if hidden not in self._quantized:  # gate and up share theirs
            self._quantized.add(hidden)
            self._nodes += onnx_int8.row_nodes(hidden)
        self._nodes += onnx_int8.product_nodes(hidden, weight, output)
        return output

    def _rms_norm(self, hidden: str, weight: str, output: str, eps: float) -> str:
        return self._add("SimplifiedLayerNormalization", [hidden, weight], [output], axis=-1, epsilon=eps)

    def _project_and_norm(self, name: str, layer: int, hidden: str, residual: str, norm: str) -> tuple[str, str]:
        """Add a linear layer, its sum with the residual, and the norm of that sum; no norm if `norm` is empty.

        Args:
            name: name of the linear layer, "out" or "down".
            hidden, residual: names of the tensors that are multiplied and added.
            norm: name of the norm's weights.

        Returns:
            The names of the normalized sum and of the sum itself; without a norm, the sum's name twice.
        """
        projected = self._linear(name, layer, hidden)
        if self._shape.output_norms:
            projected = self._rms_norm(projected, f"{name}_norm_{layer}", f"{name}_own_{layer}", self._shape.rms_eps)
        if not norm:
            return (self._add("Add", [projected, residual], [f"{name}_sum_{layer}"]),) * 2
        normed, summed = f"{name}_normed_{layer}", f"{name}_sum_{layer}"
        outputs = [normed, "", "", summed]
        inputs = [projected, residual, norm]
        self._add("SkipSimplifiedLayerNormalization", inputs, outputs, CONTRIB, epsilon=self._shape.rms_eps)
        return normed, summed

    def _normalize_heads(self, layer: int, qkv: str) -> str:
        """Add RMS norms of the queries and keys in the tensor named `qkv`, per head or over all heads.

        Return the name of the result, in which the third part, attention's values, is unchanged. Heads padded with
        zeros have a smaller mean square, so the epsilon that is added to it is smaller too.
        """
        shape = self._shape
        query, key, value = (f"{name}_part_{layer}" for name in ("query", "key", "value"))
        self._add("Split", [qkv, "qkv_sizes"], [query, key, value], axis=2)
        eps = shape.rms_eps * shape.head_dim / shape.head_room
        parts = []
        for name, part in (("query", query), ("key", key)):
            if shape.head_norms == "all":
                parts.append(self._rms_norm(part, f"{name}_norm_{layer}", f"{name}_normed_{layer}", eps))
                continue
            heads = self._add("Reshape", [part, "heads_shape"], [f"{name}_heads_{layer}"])  # [1, T, heads, head_room]
            normed = self._rms_norm(heads, f"{name}_norm_{layer}", f"{name}_normed_{layer}", eps)
            parts.append(self._add("Reshape", [normed, "flat_shape"], [f"{name}_flat_{layer}"]))
        return self._add("Concat", [*parts, value], [f"qkv_normed_{layer}"], axis=2)

    def _attention(self, layer: int, qkv: str) -> str:
        """Add rotary positions, each place's new keys and values, and attention.

        The output, whose name is returned, is [1, T, query_size]; with one place, [B, T / B, query_size].
        """
        if self._has_spare:
            qkv = self._add("Gather", [qkv, "spread"], [f"qkv_spread_{layer}"], axis=1)
        attended = self._attend(layer, 0, qkv) if len(self._places) == 1 else self._attend_all(layer, qkv)
        if self._has_spare:
            return self._add("Gather", [attended, "own"], [f"attended_own_{layer}"], axis=1)
        return attended

    def _attend_all(self, layer: int, qkv: str) -> str:
        parts = [f"qkv_{layer}_{place}" for place in self._places]
        self._add("Split", [qkv, "widths"], parts, axis=1)
        attended = [self._attend(layer, place, self._as_run(layer, place, parts[place])) for place in self._places]
        if not self._has_spare:
            attended = [self._add("Reshape", [part, "flat_attended"], [f"{part}_flat"]) for part in attended]
        return self._add("Concat", attended, [f"attended_{layer}"], axis=1)

    def _as_run(self, layer: int, place: int, part: str) -> str:
        """Add a node that splits the tokens of one kind of sequence (see `Place`) into an axis for each sequence.

        Args:
            layer: number of the layer.
            place: number of the kind of sequence.
            part: name of the array with the queries, keys and values of its tokens.

        Returns:
            The name of the new array; `part` itself if no node is needed.
        """
        if self._has_spare:
            return part
        return self._add("Reshape", [part, f"shape_{place}"], [f"qkv_run_{layer}_{place}"])

    def _attend(self, layer: int, place: int, qkv: str) -> str:
        key, value = cache_names(layer, place)
        rotary, window = self._shape.layer_rotaries[layer], self._shape.windows[layer]
        lasts, lengths = ("lasts", "lengths") if len(self._places) == 1 else (f"lasts_{place}", f"length_{place}")
        return self._add(
            "GroupQueryAttention",
            [qkv, "", "", key, value, lasts, lengths, f"cosines_{rotary}", f"sines_{rotary}"],
            [f"attended_{layer}_{place}", f"new_{key}", f"new_{value}"],
            CONTRIB,
            num_heads=self._shape.num_heads,
            kv_num_heads=self._shape.num_kv_heads,
            scale=self._shape.score_scale,
            do_rotary=1,
            local_window_size=window if 0 < window < self._room else -1,
            softcap=self._shape.score_cap,
        )

    def _parts(self) -> None:
        """Add nodes that split inputs for all places (see `Place`), such as `lasts`, into one tensor per place."""
        if len(self._places) == 1:
            return
        num_places = len(self._places)
        self._add("Split", ["lengths"], [f"length_{place}" for place in self._places], num_outputs=num_places)
        lasts = [f"lasts_{place}" for place in self._places]
        if self._has_spare:
            self._add("Split", ["lasts"], lasts, num_outputs=num_places)
            return
        self._add("Split", ["lasts", "counts"], lasts)
        self._add("Split", ["shapes"], [f"shape_{place}" for place in self._places], num_outputs=num_places)

    def _constants(self) -> list[onnx.TensorProto]:
        shape = self._shape
        constants: dict[str, np.ndarray[Any, Any]] = {}
        for index, rotary in enumerate(shape.rotaries):
            tables = rotary_tables(rotary, self._room, shape.head_room)
            constants[f"cosines_{index}"], constants[f"sines_{index}"] = tables
        if shape.logit_cap:
            constants["logit_cap"] = np.array(shape.logit_cap, np.float32)
        if self._is_int8:
            constants |= onnx_int8.CONSTANTS
        if not self._has_spare:
            constants["flat_hidden"] = np.array([1, -1, shape.hidden_size])
            constants["flat_attended"] = np.array([1, -1, shape.query_size])
        if shape.head_norms:
            constants["qkv_sizes"] = np.array([shape.query_size, shape.kv_size, shape.kv_size])
            constants["heads_shape"] = np.array([0, 0, -1, shape.head_room])  # 0 keeps a dimension, -1 is the rest
            constants["flat_shape"] = np.array([0, 0, -1])
        return [numpy_helper.from_array(array, name) for name, array in constants.items()]

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        num_places = len(self._places)
        token_ids: list[str | int] = [1, "T"] if self._has_spare or num_places > 1 else ["B", "W"]
        whole: dict[str, list[str | int]] = {"rows": ["R"]}
        if self._has_spare:
            whole |= {"spread": ["S"], "own": ["T"]}
        if num_places > 1:
            whole["widths"] = [num_places]
            whole |= {} if self._has_spare else {"counts": [num_places], "shapes": [3 * num_places]}
        return [
            helper.make_tensor_value_info("token_ids", TensorProto.INT64, token_ids),
            helper.make_tensor_value_info("lasts", TensorProto.INT32, ["B"]),
            helper.make_tensor_value_info("lengths", TensorProto.INT32, [num_places]),
            *(helper.make_tensor_value_info(name, TensorProto.INT64, size) for name, size in whole.items()),
            *self._rooms(""),
        ]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "R", self._shape.vocab_size])
        return [logits, *self._rooms("new_")]

    def _rooms(self, prefix: str) -> list[onnx.ValueInfoProto]:
        dimensions = [1 if self._has_spare else "B", self._shape.num_kv_heads, self._room, self._shape.head_room]
        return [
            helper.make_tensor_value_info(prefix + name, TensorProto.FLOAT, dimensions)
            for layer in range(self._shape.num_layers)
            for place in self._places
            for name in cache_names(layer, place)
        ]


def rotary_tables(rotary: Rotary, max_length: int, head_room: int) -> tuple[Weight, Weight]:
    """Return cosines and sines, float32 [max_length, head_room / 2]; elements without a frequency have the angle 0."""
    frequencies, scale = np.array(rotary[0], np.float32), np.float32(rotary[1])
    angles = np.zeros((max_length, head_room // 2), np.float32)
    angles[:, : len(frequencies)] = np.arange(max_length, dtype=np.float32)[:, None] * frequencies
    cosines, sines = np.cos(angles), np.sin(angles)
    cosines[:, : len(frequencies)] *= scale
    return cosines, sines * scale
