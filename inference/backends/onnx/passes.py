"""One compiled graph, ready to run passes of a fixed number of spans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]

from inference.backends.host import instruction_sets
from inference.backends.onnx.graph import cache_names
from inference.backends.onnx.layout import session_options
from inference.backends.onnx.packed import PackedDecoder
from inference.backends.onnx.shape import Weight
from inference.backends.onnx.slots import OnnxSlots
from inference.backends.spans import wanted_rows
from inference.model.slots import Span

SWEEP_SIZES = (6, 12)
"""Rows that ONNX Runtime multiplies with a float32 matrix in one sweep over it, on processors with AVX-512.

7 to 11 rows take two sweeps, which cost more than one over 12: such passes are filled up.
"""
MAX_KEPT = 24
"""Shapes whose memory is kept, for each number of spans: all widths of a pass over one."""

MAX_KEPT_BYTES = 1 << 18
"""Largest logits that are kept: beyond, writing them takes longer than finding memory for them."""


class Feeds:
    """Memory of inputs and logits of passes over `num_tokens` tokens in `num_places` spans that want `num_rows` logits.

    A pass of a small model takes 0.3 ms, and each new input that ONNX Runtime gets adds 20 us to it: passes of one
    shape write into the same memory instead.
    """

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


class OnnxPass:
    """Runs passes of exactly `num_places` spans, which is what `graph` is made for."""

    def __init__(
        self, decoder: PackedDecoder, slots: OnnxSlots, graph: onnx.ModelProto, *, num_places: int, num_threads: int
    ) -> None:
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
        self._kept: dict[tuple[int, int], Feeds] = {}  # by number of tokens and of logits
        self._bound_feeds: Feeds | None = None
        layers = range(decoder.shape.num_layers)
        self._names = [[name for layer in layers for name in cache_names(layer, place)] for place in range(num_places)]

    def run(self, spans: Sequence[Span]) -> Weight:
        """Logits of the wanted rows, float32 [num_rows, vocab_size]."""
        for place, span in enumerate(spans):
            if self._bound[place] != span.slot:
                self._bind_slot(place, span.slot)
        token_ids = [token_id for span in spans for token_id in span.token_ids]
        widths = [len(span.token_ids) for span in spans]
        ends = [span.start + width for span, width in zip(spans, widths, strict=True)]
        for span, end in zip(spans, ends, strict=True):
            self._slots.note_length(span.slot, end)
        num_filling = self._num_filling(len(token_ids), ends[-1])
        token_ids += [0] * num_filling  # after the last span, where no row is read
        widths[-1] += num_filling
        ends[-1] += num_filling
        wanted = wanted_rows(spans)
        rows = wanted or self._spare_rows
        feeds = self._feeds(len(token_ids), len(rows))
        feeds.write(token_ids, ends, widths, rows)
        self._session.run_with_iobinding(self._binding)
        return feeds.logits(len(wanted))

    def _feeds(self, num_tokens: int, num_rows: int) -> Feeds:
        """Memory for a pass of this shape, bound."""
        shape = num_tokens, num_rows
        feeds = self._kept.get(shape)
        if feeds is None:
            feeds = Feeds(len(self._bound), num_tokens, num_rows, self._vocab_size)
            if feeds.worth_keeping and len(self._kept) < MAX_KEPT:
                self._kept[shape] = feeds
        if feeds is not self._bound_feeds:
            feeds.bind(self._binding)
            self._bound_feeds = feeds
        return feeds

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
