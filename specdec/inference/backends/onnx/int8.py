"""Linear layers in int8: one scale per output of a weight matrix, and one per token that is multiplied with it.

With a scale for the whole tensor, as in ONNX Runtime's and torch's own dynamic quantization, a token's logits would
depend on its neighbours in the pass; with one per token they do not. Products are sums of integers, equal in any order
of adding, so a token's logits have the same bits in every pass.

Activations become unsigned, 128 standing for 0, because processors multiply unsigned with signed bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper

from specdec.inference.backends.host import instruction_sets
from specdec.inference.backends.onnx.shape import Weight

Int8: TypeAlias = "np.ndarray[Any, np.dtype[np.int8]]"

MATRICES = ("qkv", "out", "gate", "up", "down", "head")
ROW_LEVELS = 127
ZERO_POINT = 128
SMALLEST_SCALE = 1e-30  # of a row of zeros

CONSTANTS: dict[str, np.ndarray[Any, Any]] = {
    "row_step": np.array(1 / ROW_LEVELS, np.float32),
    "zero_point": np.array(ZERO_POINT, np.uint8),
    "smallest_scale": np.array(SMALLEST_SCALE, np.float32),
    "unit_scale": np.array(1, np.float32),
    "last_axis": np.array([-1], np.int64),
}
"""Initializers, by name, that the nodes of `row_nodes` and `product_nodes` read."""


def weight_levels() -> int:
    """Return the largest absolute value of a quantized weight: 127, or 63 on x86 without VNNI.

    Those processors add two products in 16 bits; with 8-bit weights the sum can overflow, with 7-bit weights it cannot.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return 63 if is_x86 and "vnni" not in instruction_sets() else 127


def quantized_weights(weights: Iterable[tuple[str, Weight]], levels: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield weights, with each matrix [in, out] of a linear layer as int8 and its scales as `NAME_scale`.

    Scales are float32 [out]: factors that turn an int8 product with rows of `row_nodes` into the float32 product.

    Args:
        levels: largest absolute value of a quantized weight.
    """
    for name, array in weights:
        if name.split("_")[0] not in MATRICES or array.ndim != 2:
            yield name, array
            continue
        matrix, scale = quantize_columns(array, levels)
        yield name, matrix
        yield f"{name}_scale", scale / np.float32(ROW_LEVELS)


def quantize_columns(matrix: Weight, levels: int) -> tuple[Int8, Weight]:
    """Return int8 [in, out] and float32 scales [out], whose product approximates a matrix [in, out].

    Args:
        levels: largest absolute value of the int8 numbers.
    """
    largest = np.abs(matrix).max(axis=0)
    scale = np.maximum(largest / np.float32(levels), np.float32(SMALLEST_SCALE))
    return np.rint(matrix / scale).astype(np.int8), scale


def row_nodes(hidden: str) -> list[onnx.NodeProto]:
    """Return nodes that quantize the tensor called `hidden`, float32 [1, T, size], token by token.

    Their results are `HIDDEN_rows`, uint8 [1, T, size], and `HIDDEN_scale`, float32 [1, T, 1], which has each token's
    largest magnitude.
    """
    name = f"{hidden}_{{}}".format
    return [
        helper.make_node("Abs", [hidden], [name("magnitudes")]),
        helper.make_node("ReduceMax", [name("magnitudes"), "last_axis"], [name("largest")], keepdims=1),
        helper.make_node("Max", [name("largest"), "smallest_scale"], [name("scale")]),
        helper.make_node("Div", [hidden, name("scale")], [name("scaled")]),  # in -1 .. 1
        helper.make_node("QuantizeLinear", [name("scaled"), "row_step", "zero_point"], [name("rows")]),
    ]


def product_nodes(hidden: str, weight: str, output: str) -> list[onnx.NodeProto]:
    """Return nodes that multiply the results of `row_nodes(hidden)` with an int8 matrix.

    Args:
        hidden: name of the tensor that `row_nodes` quantizes.
        weight: name of the matrix, int8 [in, out]; its scales are `WEIGHT_scale`.
        output: name of the result, float32 [1, T, out].
    """
    inputs = [f"{hidden}_rows", weight, "unit_scale", f"{weight}_scale", "zero_point"]
    return [
        helper.make_node("MatMulIntegerToFloat", inputs, [f"{output}_scaled"], domain="com.microsoft"),
        helper.make_node("Mul", [f"{output}_scaled", f"{hidden}_scale"], [output]),
    ]
