"""Memory of a pass's inputs and logits, kept from pass to pass.

A pass of a small model takes 0.3 ms, and each input that is handed to ONNX Runtime anew adds 20 us to it: passes of one
shape write into the same memory instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime  # type: ignore[import-untyped]

from inference.backends.onnx.shape import Weight

MAX_KEPT = 24
"""Shapes whose memory is kept, for each number of spans: all widths of a pass over one."""

MAX_KEPT_BYTES = 1 << 18
"""Largest logits that are kept: beyond, writing them takes longer than finding memory for them."""


class Feeds:
    """Inputs and logits of passes over `num_tokens` tokens in `num_places` spans that want `num_rows` logits."""

    def __init__(self, num_places: int, num_tokens: int, num_rows: int, vocab_size: int) -> None:
        self._token_ids = np.empty((1, num_tokens), np.int64)
        self._ends = np.empty(num_places, np.int32)
        self._rows = np.empty(num_rows, np.int64)
        self._widths = np.empty(num_places, np.int64)
        self._logits = np.empty((1, num_rows, vocab_size), np.float32)
        inputs = {"token_ids": self._token_ids, "ends": self._ends, "rows": self._rows}
        if num_places > 1:
            inputs["widths"] = self._widths
        self._values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
        self._logits_value = onnxruntime.OrtValue.ortvalue_from_numpy(self._logits)

    @property
    def worth_keeping(self) -> bool:
        return self._logits.nbytes <= MAX_KEPT_BYTES

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        """Let runs read and write this memory."""
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("logits", self._logits_value)

    def write(self, token_ids: Sequence[int], ends: Sequence[int], widths: Sequence[int], rows: Sequence[int]) -> None:
        self._token_ids[0] = token_ids
        self._ends[:] = ends
        self._widths[:] = widths
        self._rows[:] = rows

    def logits(self, num_rows: int) -> Weight:
        """The first rows, float32 [num_rows, vocab_size]; a copy where the memory is used again."""
        rows: Weight = self._logits[0, :num_rows]
        return rows.copy() if self.worth_keeping else rows
