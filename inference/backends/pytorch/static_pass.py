"""Passes of fixed shapes for the torch backend, each captured once as a CUDA graph and replayed from then on.

On a GPU, decoding is bound by launching kernels one at a time from Python; a replayed graph is one launch. A graph
wants the same shapes and the same memory every time, so spans are filled up to buckets of number, width and length, and
what distinguishes one pass from the next is written into tensors that the graph reads: token ids, positions and slots.
Slots mean what they mean in `inference.backends.pytorch.attention`, whose passes these alternate with; prompts are not
captured.

Off CUDA the same code runs without capture, which is how it is tested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention

from inference.backends.pytorch.attention import LayerAttention, Options, changes_scores, scored_attention
from inference.backends.pytorch.slot_cache import SlotCache
from inference.backends.spans import wanted_rows
from inference.model.slots import Span

logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 3, 5, 9, 17)
"""Tokens per span; 17 verifies 16 draft tokens."""

SHORTEST_LENGTH = 256
"""Positions that attention reads, at least; longer passes read twice, four times, ... as many."""

NUM_WARM_UPS = 2  # libraries choose kernels and allocate workspace in their first runs, which a graph must not hold

RunModel = Callable[[Tensor, LayerAttention], Tensor]
"""Token ids and positions [2, num_tokens] -> logits of all tokens [num_tokens, vocab_size]."""


class StaticPass:
    """The buffers of one shape, and attention over them.

    Args:
        batch: spans.
        width: tokens of each.
        length: positions that attention reads; no span may end after them.
    """

    def __init__(self, cache: SlotCache, *, batch: int, width: int, length: int) -> None:
        self._cache = cache
        self._shape = batch, width
        self._length = length
        device = cache.keys[0].device
        self.inputs = torch.zeros(2, batch * width, dtype=torch.long, device=device)  # token ids, positions
        self._slots = torch.zeros(batch, dtype=torch.long, device=device)
        self._places = torch.zeros(batch, width, dtype=torch.long, device=device)  # where keys and values are written
        self._all_positions = torch.arange(length, device=device)
        self._masks: dict[int, Tensor] = {}  # window -> [batch, 1, width, length], of the pass that runs

    def fill(self, spans: Sequence[Span]) -> None:
        """Write the next pass into the buffers. Filling tokens write to the spare position and see position 0."""
        batch, width = self._shape
        token_ids = torch.zeros(batch, width, dtype=torch.long)
        positions = torch.zeros(batch, width, dtype=torch.long)
        places = torch.full((batch, width), self._cache.max_length, dtype=torch.long)
        slots = torch.zeros(batch, dtype=torch.long)
        for row, span in enumerate(spans):
            num_tokens = len(span.token_ids)
            token_ids[row, :num_tokens] = torch.tensor(list(span.token_ids))
            positions[row, :num_tokens] = torch.arange(span.start, span.start + num_tokens)
            places[row, :num_tokens] = positions[row, :num_tokens]
            slots[row] = span.slot
        self.inputs.copy_(torch.stack([token_ids.flatten(), positions.flatten()]))
        self._places.copy_(places)
        self._slots.copy_(slots)

    def rows(self, spans: Sequence[Span]) -> list[int]:
        """Rows of the logits that were asked for, when spans stand `width` rows apart."""
        width = self._shape[1]
        return [row * width + token for row, span in enumerate(spans) for token in wanted_rows([span])]

    def prepare(self) -> None:
        """Forget the masks, which depend on positions: making them is part of the graph."""
        self._masks.clear()

    def _mask(self, window: int) -> Tensor:
        """Return what is added to the scores, [batch, 1, width, length]; layers of one window share it."""
        if window not in self._masks:
            batch, width = self._shape
            positions = self.inputs[1].view(batch, 1, width, 1)
            seen = (self._all_positions <= positions) & (self._all_positions > positions - window)
            hidden = torch.zeros(seen.shape, dtype=self._cache.keys[0].dtype, device=seen.device)
            self._masks[window] = hidden.masked_fill(~seen, -torch.inf)
        return self._masks[window]

    def attend(
        self, module: Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, options: Options
    ) -> Tensor:
        """See `inference.backends.pytorch.attention.LayerAttention`."""
        batch, width = self._shape
        layer: int = module.layer_idx  # type: ignore[assignment]
        keys = self._extend(self._cache.keys[layer], key)
        values = self._extend(self._cache.values[layer], value)
        query = query[0].reshape(-1, batch, width, query.shape[3]).transpose(0, 1)  # [batch, num_heads, width, dim]
        mask = self._mask(min(options.get("sliding_window") or self._length, self._length))
        if changes_scores(options):
            attended = scored_attention(query, keys, values, mask, scaling=scaling, options=options)
        else:
            attended = scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
            )
        return attended.transpose(1, 2).flatten(0, 1)[None]  # [1, num_tokens, num_heads, dim]

    def _extend(self, room: Tensor, new: Tensor) -> Tensor:
        """Write [1, num_kv_heads, num_tokens, dim]; return the slots so far, [batch, num_kv_heads, length, dim]."""
        by_token = new[0].reshape(-1, *self._shape, new.shape[3]).permute(1, 2, 0, 3)  # [batch, width, heads, dim]
        room[self._slots[:, None], :, self._places] = by_token
        return room[:, :, : self._length].index_select(0, self._slots)


class StaticPasses:
    """Runs passes whose spans fit a bucket.

    Args:
        run_model: computes logits, attending through the pass it is given.
        cache: slots with a spare position after each.
    """

    def __init__(self, run_model: RunModel, cache: SlotCache) -> None:
        self._run_model = run_model
        self._cache = cache
        self._captures = cache.keys[0].device.type == "cuda"
        self._replays: dict[tuple[int, int, int], tuple[StaticPass, Callable[[], Tensor]]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None

    def forward(self, spans: Sequence[Span]) -> Tensor | None:
        """Logits of the wanted rows, [num_rows, vocab_size]; None if the spans are too wide for any bucket."""
        shape = self._bucket(spans)
        if shape is None:
            return None
        static, replay = self._replays.get(shape) or self._make(shape, spans)
        static.fill(spans)
        rows = torch.tensor(static.rows(spans), dtype=torch.long).to(static.inputs.device, non_blocking=True)
        return replay().index_select(0, rows)  # a copy: the next pass of this shape overwrites the graph's own

    def _bucket(self, spans: Sequence[Span]) -> tuple[int, int, int] | None:
        widest = max(len(span.token_ids) for span in spans)
        width = next((width for width in WIDTHS if width >= widest), None)
        if width is None:
            return None
        end = max(span.start + len(span.token_ids) for span in spans)
        batch = min(_doubled(1, len(spans)), self._cache.num_slots)
        return batch, width, min(_doubled(SHORTEST_LENGTH, end), self._cache.max_length)

    def _make(self, shape: tuple[int, int, int], spans: Sequence[Span]) -> tuple[StaticPass, Callable[[], Tensor]]:
        batch, width, length = shape
        static = StaticPass(self._cache, batch=batch, width=width, length=length)

        def run() -> Tensor:
            static.prepare()
            return self._run_model(static.inputs, static)

        static.fill(spans)  # capturing runs the pass, and running it twice does no harm
        self._replays[shape] = static, self._captured(run) if self._captures else run
        return self._replays[shape]

    def _captured(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def _doubled(smallest: int, needed: int) -> int:
    """`smallest`, doubled until it suffices."""
    size = smallest
    while size < needed:
        size *= 2
    return size
