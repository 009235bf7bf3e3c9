"""Inputs of a graph: their values for a pass, and the memory that they are written to.

A pass is divided into places, the groups of sequences that attend together; see `Place`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime  # type: ignore[import-untyped]

from specdec.inference.backends.onnx.places import Place
from specdec.inference.backends.onnx.shape import Weight
from specdec.inference.model.slots import Span

INT32_INPUTS = ("lasts", "lengths")
"""Inputs of type int32; all others are int64."""
MAX_KEPT_BYTES = 1 << 18
"""Size of the largest logits whose memory is kept. Writing larger ones takes longer than allocating their memory."""


@dataclass(slots=True)
class Flattened:
    """Tokens of a pass in a row, place by place (a place is a group of sequences that attend together, see `Place`).

    Attributes:
        token_ids: ids of the tokens, padding included.
        lasts: last position of each sequence, place by place.
        lengths: number of positions of each place's longest sequence.
        rows: numbers of the tokens for which logits are wanted, in the order of the spans.
    """

    token_ids: list[int]
    lasts: list[int]
    lengths: list[int]
    rows: list[int]


def flattened(spans: Sequence[Span], places: Sequence[Place]) -> Flattened:
    """Return the tokens of the spans in a row, place by place (see `Place`), each span padded to its place's width.

    Padding has token id 0.
    """
    if len(spans) == 1:  # a fifth of the time, which counts in a draft's pass of 0.2 ms
        return _flattened_span(spans[0], places[0].width)
    token_ids: list[int] = []
    lasts: list[int] = []
    lengths: list[int] = []
    wanted: dict[int, range] = {}  # rows by span
    for place in places:
        length = 0
        for index in place.spans:
            span = spans[index]
            token_ids += span.token_ids
            wanted[index] = range(len(token_ids) - span.num_logits, len(token_ids))
            token_ids += [0] * (place.width - len(span.token_ids))
            end = span.start + place.width
            lasts.append(end - 1)
            length = max(length, end)
        lengths.append(length)
    return Flattened(token_ids, lasts, lengths, [row for index in sorted(wanted) for row in wanted[index]])


def _flattened_span(span: Span, width: int) -> Flattened:
    num_tokens, end = len(span.token_ids), span.start + width
    token_ids = [*span.token_ids, *[0] * (width - num_tokens)]
    return Flattened(token_ids, [end - 1], [end], list(range(num_tokens - span.num_logits, num_tokens)))


def run_inputs(flat: Flattened, places: Sequence[Place], num_elements: int) -> dict[str, Sequence[int]]:
    """Return the inputs, by name, of a graph that adds no spare token to a span (see `graph`).

    Args:
        num_elements: elements of a token's query, key and value together.
    """
    inputs: dict[str, Sequence[int]] = {
        "token_ids": flat.token_ids,
        "lasts": flat.lasts,
        "lengths": flat.lengths,
        "rows": flat.rows,
    }
    if len(places) > 1:
        inputs["counts"] = [len(place.spans) for place in places]
        inputs["widths"] = [len(place.spans) * place.width for place in places]
        inputs["shapes"] = [size for place in places for size in (len(place.spans), place.width, num_elements)]
    return inputs


def spare_inputs(flat: Flattened, places: Sequence[Place]) -> dict[str, Sequence[int]]:
    """Return the inputs, by name, of a graph that adds a spare token to each span: a copy of the span's last token."""
    spread: list[int] = []
    own: list[int] = []
    start = 0
    for number, place in enumerate(places):
        end = start + place.width
        spread += range(start, end)
        spread.append(end - 1)
        own += range(start + number, end + number)
        start = end
    inputs: dict[str, Sequence[int]] = {
        "token_ids": flat.token_ids,
        "lasts": flat.lengths,
        "lengths": [length + 1 for length in flat.lengths],
        "rows": flat.rows or [0],  # MatMulInteger refuses to multiply no row at all
        "spread": spread,
        "own": own,
    }
    if len(places) > 1:
        inputs["widths"] = [place.width + 1 for place in places]
    return inputs


class Feeds:
    """Memory of the inputs and logits of passes of one shape.

    Passes of one shape write into the same memory, since each new input costs ONNX Runtime 20 us, and a pass of a small
    model takes 0.3 ms.

    Args:
        inputs: inputs of one pass of this shape, by name; only their lengths matter.
        num_rows: number of rows, all of the same length, into which the token ids are split.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]], num_rows: int, vocab_size: int) -> None:
        self._arrays = {
            name: np.empty(len(values), np.int32 if name in INT32_INPUTS else np.int64)
            for name, values in inputs.items()
        }
        shaped = self._arrays | {"token_ids": self._arrays["token_ids"].reshape(num_rows, -1)}
        self._values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in shaped.items()}
        self._logits = np.empty((1, len(inputs["rows"]), vocab_size), np.float32)
        self._logits_value = onnxruntime.OrtValue.ortvalue_from_numpy(self._logits)

    @property
    def worth_keeping(self) -> bool:
        """Return whether using this memory again is faster than allocating memory for each pass."""
        return self._logits.nbytes <= MAX_KEPT_BYTES

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        """Bind this memory to the inputs and the logits of the session that `binding` belongs to."""
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("logits", self._logits_value)

    def write(self, inputs: Mapping[str, Sequence[int]]) -> None:
        """Write the values of a pass's inputs, by name, into this memory."""
        for name, values in inputs.items():
            self._arrays[name][:] = values

    def logits(self, num_rows: int) -> Weight:
        """Return the first rows of the logits, float32 [num_rows, vocab_size]; a copy if this memory is used again."""
        rows: Weight = self._logits[0, :num_rows]
        return rows.copy() if self.worth_keeping else rows
