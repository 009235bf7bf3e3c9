"""Session of ONNX Runtime over one graph, which runs passes with a fixed number of places (see `Place`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnxruntime  # type: ignore[import-untyped]

from specdec.inference.backends.onnx.feeds import Feeds, flattened, run_inputs, spare_inputs
from specdec.inference.backends.onnx.graph import cache_names
from specdec.inference.backends.onnx.layout import session_options
from specdec.inference.backends.onnx.packed import PackedDecoder
from specdec.inference.backends.onnx.places import Place
from specdec.inference.backends.onnx.shape import Weight
from specdec.inference.backends.onnx.slots import OnnxSlots
from specdec.inference.model.slots import Span

MAX_KEPT = 48
"""Most shapes of passes whose memory is kept by one `OnnxPass`; with one place, enough for all sizes of a pass."""


class OnnxPass:
    """Runner of passes with exactly `num_places` places (see `Place`), the number that `graph` was made for.

    Args:
        graph: model that `DecoderGraph.build` made.
        num_threads: threads of a pass.
    """

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
        self._decoder = decoder
        self._has_spare = any(each.name == "spread" for each in graph.graph.input)
        self._num_elements = decoder.shape.query_size + 2 * decoder.shape.kv_size
        self._bound: list[range | None] = [None] * num_places  # slots of each place
        self._kept: dict[tuple[int, int, int], Feeds] = {}  # by number of tokens, of sequences and of logits
        self._bound_feeds: Feeds | None = None
        layers = range(decoder.shape.num_layers)
        self._names = [[name for layer in layers for name in cache_names(layer, place)] for place in range(num_places)]

    def run(self, spans: Sequence[Span], places: Sequence[Place]) -> Weight:
        """Return the logits of the wanted rows, in the order of the spans, float32 [num_rows, vocab_size].

        Args:
            spans: spans of the whole pass; `places` names those that run now.
            places: exactly `num_places`.
        """
        places = self._arranged(places)
        flat = flattened(spans, places)
        inputs = spare_inputs(flat, places) if self._has_spare else run_inputs(flat, places, self._num_elements)
        feeds = self._feeds(inputs, len(flat.lasts))
        feeds.write(inputs)
        self._session.run_with_iobinding(self._binding)
        return feeds.logits(len(flat.rows))

    def _feeds(self, inputs: Mapping[str, Sequence[int]], num_sequences: int) -> Feeds:
        """Return bound memory for the inputs and logits of a pass of this size, perhaps that of an earlier pass."""
        shape = len(inputs["token_ids"]), num_sequences, len(inputs["rows"])
        feeds = self._kept.get(shape)
        if feeds is None:
            num_rows = num_sequences if len(self._bound) == 1 else 1
            feeds = Feeds(inputs, num_rows, self._decoder.shape.vocab_size)
            if feeds.worth_keeping and len(self._kept) < MAX_KEPT:
                self._kept[shape] = feeds
        if feeds is not self._bound_feeds:
            self._bound_feeds = None  # until all are: if one fails, the rest are still another pass's
            feeds.bind(self._binding)
            self._bound_feeds = feeds
        return feeds

    def _arranged(self, places: Sequence[Place]) -> Sequence[Place]:
        """Return the places in an order in which most are bound to their slots already; bind the others to theirs."""
        if [place.slots for place in places] == self._bound:
            return places
        new = {place.slots: place for place in places}
        kept = [new.pop(slots, None) if slots else None for slots in self._bound]
        rest = iter(new.values())
        arranged = [place or next(rest) for place in kept]
        for number, place in enumerate(arranged):
            if kept[number] is None:
                self._bind(number, place.slots)
        return arranged

    def _bind(self, place: int, slots: range) -> None:
        """Bind the keys and values of `slots` to the graph's inputs and outputs number `place`; a run extends them."""
        self._bound[place] = None  # until all are: if one fails, the rest are still another sequence's
        for name, value in zip(self._names[place], self._slots.values(slots), strict=True):
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(f"new_{name}", value)
        self._bound[place] = slots
