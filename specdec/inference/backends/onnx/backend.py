"""The onnx backend: decoders in float32 or int8 on CPU through ONNX Runtime, over slots and positions.

Owns the loading of a checkpoint and the choice of the graph for a pass. A pass is divided into places (groups of
sequences that attend together, see `Place`), and there is one graph per number of places. All are built at loading,
since building one later would stop all sequences for 0.1 s. The graphs share the weights in memory. Other families,
dtypes and devices need the torch backend.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from specdec.inference.backends.architectures import architecture_name, require_supported_config, resolve_length
from specdec.inference.backends.host import instruction_sets
from specdec.inference.backends.onnx.graph import DecoderGraph
from specdec.inference.backends.onnx.int8 import weight_levels
from specdec.inference.backends.onnx.packed import PackedDecoder, discard, packed_decoder
from specdec.inference.backends.onnx.passes import OnnxPass
from specdec.inference.backends.onnx.places import Place, shared_places, single_places
from specdec.inference.backends.onnx.slots import OnnxSlots
from specdec.inference.backends.spans import check_spans
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError, UnsupportedModelError
from specdec.inference.model.slots import Array, Span

logger = logging.getLogger(__name__)

MAX_PLACES = 16
"""Most places (groups of sequences that attend together, see `Place`) of one run of a graph.

A pass with more places runs in groups of this size, in which arithmetic takes longer than reading the weights, so
reading them again costs little.
"""

SWEEP_SIZES = (6, 12)
"""Numbers of rows that ONNX Runtime multiplies with a float32 matrix in one sweep over the matrix, with AVX-512.

7 to 11 rows take two sweeps, which cost more than one sweep for 12 rows, so padding fills such passes up to 12.
"""

PROBE_TOLERANCES = {"float32": 1e-3, "int8": 0.3}
"""Largest difference from Transformers' logits that the test at loading accepts, by dtype; relative to the largest
logit, or to 1 if that is larger."""


class OnnxBackend:
    """Backend over the ONNX graphs of a decoder, with memory for the keys and values of its slots.

    Args:
        num_threads: threads of a pass.
        is_exact: True to make a token's logits in float32 the same bits however many tokens a pass has. A graph then
            pads each span with a spare token (see `graph`); in int8 it always does.
    """

    def __init__(
        self, decoder: PackedDecoder, *, num_slots: int, max_length: int, num_threads: int, is_exact: bool = False
    ) -> None:
        self._decoder = decoder
        self._has_spare = is_exact or decoder.dtype == "int8"
        self._num_threads = num_threads
        self._slots = OnnxSlots(decoder.shape, num_slots=num_slots, max_length=max_length)
        self._fills_up = decoder.dtype == "float32" and "avx512f" in instruction_sets()
        self.vocab_size, self.num_slots, self.max_length = decoder.shape.vocab_size, num_slots, max_length
        self.slot_bytes = self._slots.slot_bytes
        levels = weight_levels() if decoder.dtype == "int8" else 0
        self.arithmetic = f"onnx {decoder.dtype} cpu {levels}"
        if is_exact and decoder.dtype != "int8":
            self.arithmetic += " with spare tokens"
        self._passes = [self._pass(num_places) for num_places in range(1, min(num_slots, MAX_PLACES) + 1)]

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1 from one slot to another."""
        self._slots.fork(source_slot, destination_slot, start, end)

    def forward(self, spans: Sequence[Span]) -> Array:
        """Run one pass over spans of distinct slots; return logits as a numpy array, float32 [num_rows, vocab_size]."""
        check_spans(spans, self)
        for span in spans:
            self._slots.note_length(span.slot, span.start + len(span.token_ids))
        places = self._places(spans)
        if len(places) <= MAX_PLACES:
            return self._passes[len(places) - 1].run(spans, places)
        return self._forward_in_groups(spans, places)

    def _forward_in_groups(self, spans: Sequence[Span], places: Sequence[Place]) -> Array:
        ends = list(itertools.accumulate(span.num_logits for span in spans))
        logits = np.empty((ends[-1], self.vocab_size), np.float32)
        for first in range(0, len(places), MAX_PLACES):
            group = places[first : first + MAX_PLACES]
            indices = sorted(index for place in group for index in place.spans)
            rows = [row for index in indices for row in range(ends[index] - spans[index].num_logits, ends[index])]
            logits[rows] = self._passes[len(group) - 1].run(spans, group)
        return logits

    def _places(self, spans: Sequence[Span]) -> list[Place]:
        if self._has_spare or len(spans) == 1:
            return single_places(spans, self._num_filling(spans))
        return shared_places(spans, self._num_filling(spans))

    def _num_filling(self, spans: Sequence[Span]) -> int:
        """Return how many tokens of padding after the last span make a pass faster; 0 if none do, or none fit."""
        if not self._fills_up:
            return 0
        shorter, longer = SWEEP_SIZES
        num_filling = longer - sum(len(span.token_ids) for span in spans)
        end = spans[-1].start + len(spans[-1].token_ids)
        fits = 0 < num_filling < longer - shorter and end + num_filling <= self.max_length
        return num_filling if fits else 0

    def _pass(self, num_places: int) -> OnnxPass:
        decoder, slots = self._decoder, self._slots
        made = DecoderGraph(decoder.shape, decoder.dtype, num_places, slots.room, has_spare=self._has_spare)
        graph = made.build(decoder.weights)
        return OnnxPass(decoder, slots, graph, num_places=num_places, num_threads=self._num_threads)

    def probe_error(self) -> float:
        """Return the largest difference between this backend's logits and Transformers', relative to the largest logit.

        The largest logit is Transformers', but 1 at least. Runs tokens through slot 0 as a prompt, a continuation and
        one more token; slots that are too short run what fits.
        """
        token_ids = self._decoder.probe_token_ids[: self.max_length]
        expected = self._decoder.probe_logits[: len(token_ids)]
        ends = [0, len(token_ids) // 2, len(token_ids) - 1, len(token_ids)]
        parts = [Span(0, start, token_ids[start:end], end - start) for start, end in pairwise(ends) if start < end]
        logits = np.concatenate([self.forward([part]) for part in parts])
        return float(np.abs(logits - expected).max() / max(1.0, np.abs(expected).max()))


def load_onnx_backend(config: ModelConfig) -> OnnxBackend:
    """Load a checkpoint. The first load leaves packed weights in the user's cache; later ones read only these.

    Raises:
        ConfigError: the checkpoint, the settings or the cache cannot be used; the message names which.
    """
    dtype = resolve_dtype(config)
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    for _ in range(2):  # a packed form may be damaged, or from a processor that only looks the same
        decoder = packed_decoder(config.path, dtype, config.sequence_length)
        max_length = resolve_length(decoder.config, config.sequence_length)
        require_supported_config(decoder.config, max_length, windows=True)
        sizes: dict[str, Any] = {"max_length": max_length, "num_threads": num_threads}
        sizes["is_exact"] = config.exact == "always"
        backend = OnnxBackend(decoder, num_slots=config.num_slots, **sizes)
        error = backend.probe_error()
        if any(0 < window < max_length for window in decoder.shape.windows):
            narrow = OnnxBackend(decoder.narrowed(), num_slots=1, **sizes)
            error = float(np.maximum(error, narrow.probe_error()))  # NaN if either is
        if error <= PROBE_TOLERANCES[dtype]:  # not if it is NaN
            return backend
        logger.warning("model %s: packed weights are off by %.2g, making them again", config.path.name, error)
        discard(decoder)
    raise UnsupportedModelError(
        f"{architecture_name(decoder.config)} is not supported by backend onnx: "
        f"its logits differ from Transformers' by {error:.2g} of the largest: use backend torch"
    )


def resolve_dtype(config: ModelConfig) -> str:
    """Return the dtype to compute in; raise ConfigError for a device or dtype that this backend lacks."""
    if config.device not in ("auto", "cpu"):
        raise ConfigError(f"device {config.device}: backend onnx computes on cpu only")
    dtype = "float32" if config.dtype == "auto" else config.dtype
    if dtype not in PROBE_TOLERANCES:
        raise ConfigError(f"dtype {dtype}: backend onnx computes in {' or '.join(PROBE_TOLERANCES)} only")
    return dtype
