"""Session of ONNX Runtime over one graph, for passes with a fixed number of places.

A place is a group of sequences that attend together (see `Place`).
"""

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
"""Most shapes of passes for which one `OnnxPass` keeps memory. A graph for one place needs no more than this."""


class OnnxPass:
    """Runner of passes with exactly `num_places` places (groups of sequences that attend together, see `Place`).

    Args:
        decoder: the model, with its packed weights.
        slots: memory of keys and values.
        graph: model that `DecoderGraph.build` made for this number of places.
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
        """Run spans; return the logits that they ask for, in the order of the spans, float32 [num_rows, vocab_size].

        Args:
            spans: all spans of the pass.
            places: exactly `num_places` places, which name the spans that run now.
        """
        places = self._arranged(places)
        flat = flattened(spans, places)
        inputs = spare_inputs(flat, places) if self._has_spare else run_inputs(flat, places, self._num_elements)
        feeds = self._feeds(inputs, len(flat.lasts))
        feeds.write(inputs)
        self._session.run_with_iobinding(self._binding)
        return feeds.logits(len(flat.rows))

    def _feeds(self, inputs: Mapping[str, Sequence[int]], num_sequences: int) -> Feeds:
        """Return memory for the inputs and logits of a pass of this size, bound to the session.

        It is that of an earlier pass of the same size, if this was kept.

        Args:
            inputs: the pass's inputs by name.
        """
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
        """Reorder places (see `Place`) so that most already have their slots bound to the graph; bind the others.

        Returns:
            The places in that order.
        """
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
        """Bind the keys and values of `slots` to inputs and outputs of the graph's place number `place`.

        A run of the session then writes new keys and values into the slots.
        """
        self._bound[place] = None  # until all are: if one fails, the rest are still another sequence's
        for name, value in zip(self._names[place], self._slots.values(slots), strict=True):
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(f"new_{name}", value)
        self._bound[place] = slots
