"""One compiled graph, ready to run passes of a fixed number of spans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime  # type: ignore[import-untyped]

from inference.backends.onnx_graph import cache_names, decoder_graph
from inference.backends.onnx_pack import PackedDecoder, session_options
from inference.backends.onnx_shape import Weight
from inference.backends.onnx_slots import OnnxSlots
from inference.backends.processor import instruction_sets
from inference.backends.spans import wanted_rows
from inference.types import Span

SWEEP_SIZES = (6, 12)
"""Rows that ONNX Runtime multiplies with a float32 matrix in one sweep over it, on processors with AVX-512.

7 to 11 rows take two sweeps, which cost more than one over 12: such passes are filled up.
"""


class OnnxPass:
    """Runs passes of exactly `num_places` spans."""

    def __init__(self, decoder: PackedDecoder, slots: OnnxSlots, *, num_places: int, num_threads: int) -> None:
        graph = decoder_graph(
            decoder.shape, decoder.weights, dtype=decoder.dtype, num_places=num_places, room=slots.room
        )
        options = session_options(num_threads)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(decoder.folder))
        self._session = onnxruntime.InferenceSession(
            graph.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._binding = self._session.io_binding()
        self._slots = slots
        self._vocab_size = decoder.shape.vocab_size
        self._spare_rows = [0] if decoder.dtype == "int8" else []  # MatMulInteger refuses to multiply no row at all
        self._fills_up = decoder.dtype == "float32" and "avx512f" in instruction_sets()
        self._bound: list[int | None] = [None] * num_places  # slot of each place
        layers = range(decoder.shape.num_layers)
        self._names = [[name for layer in layers for name in cache_names(layer, place)] for place in range(num_places)]

    def run(self, spans: Sequence[Span]) -> Weight:
        """Logits of the wanted rows, float32 [num_rows, vocab_size]."""
        for place, span in enumerate(spans):
            if self._bound[place] != span.slot:
                self._bind_slot(place, span.slot)
        self._bind_inputs(spans)
        wanted = wanted_rows(spans)
        rows = np.array(wanted or self._spare_rows, np.int64)
        self._binding.bind_cpu_input("rows", rows)
        logits = np.empty((1, len(rows), self._vocab_size), np.float32)
        self._binding.bind_ortvalue_output("logits", onnxruntime.OrtValue.ortvalue_from_numpy(logits))
        self._session.run_with_iobinding(self._binding)
        rows_of_logits: Weight = logits[0, : len(wanted)]
        return rows_of_logits

    def _bind_inputs(self, spans: Sequence[Span]) -> None:
        token_ids = [token_id for span in spans for token_id in span.token_ids]
        ends = [span.start + len(span.token_ids) for span in spans]
        num_filling = self._num_filling(len(token_ids), ends[-1])
        token_ids += [0] * num_filling  # behind the last span, where nobody looks
        ends[-1] += num_filling
        self._binding.bind_cpu_input("token_ids", np.array([token_ids], np.int64))  # [1, num_tokens]
        self._binding.bind_cpu_input("ends", np.array(ends, np.int32))
        if len(spans) > 1:
            widths = [len(span.token_ids) for span in spans]
            widths[-1] += num_filling
            self._binding.bind_cpu_input("widths", np.array(widths, np.int64))

    def _num_filling(self, num_tokens: int, end: int) -> int:
        """Tokens to add to a pass so that it takes one sweep, if its last span has room for them."""
        shorter, longer = SWEEP_SIZES
        if not self._fills_up or not shorter < num_tokens < longer:
            return 0
        num_filling = longer - num_tokens
        return num_filling if end + num_filling <= self._slots.max_length else 0

    def _bind_slot(self, place: int, slot: int) -> None:
        """Let a place read and extend a slot's memory."""
        for name, value in zip(self._names[place], self._slots.values(slot), strict=True):
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(f"new_{name}", value)
        self._bound[place] = slot
