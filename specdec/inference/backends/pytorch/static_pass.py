"""Passes of fixed shapes for the torch backend: each is made once, before a server is ready, and run from then on.

A graph needs the same shapes and the same memory every time. So spans are padded to a `Shape`, and everything that
distinguishes one pass from the next is written into one tensor that the graph reads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention

from specdec.inference.backends.pytorch.attention import Options, changes_scores, scored_attention
from specdec.inference.backends.pytorch.graphs import Maker, Run
from specdec.inference.backends.pytorch.runner import ModelRunner
from specdec.inference.backends.pytorch.shapes import Buckets, Shape, Shapes
from specdec.inference.backends.pytorch.slot_cache import SlotCache, SlotCopy
from specdec.inference.backends.spans import wanted_rows
from specdec.inference.model.slots import GraphCounts, Span

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 10.0
"""Seconds between two lines of a warm-up's progress."""


@dataclass(frozen=True, slots=True)
class FixedShapes:
    """Fixed shapes of a backend's passes: the sizes of the shapes, and the maker of a graph for each shape."""

    maker: Maker
    buckets: Buckets


class StaticPass:
    """Attention (a `LayerAttention`) of passes of one fixed shape, and the tensor with the inputs of these passes.

    If the shape has as many spans as there are slots, and spans share none, row i of the pass is slot i: then keys and
    values are read in place. In other shapes the keys and values of the rows' slots are copied.

    Args:
        graphs_only: whether the device runs nothing but graphs; then attention is made of plain operations.
        shares_slots: whether spans of one pass may belong to the same slot.
    """

    def __init__(
        self, cache: SlotCache, shape: Shape, *, graphs_only: bool = False, shares_slots: bool = False
    ) -> None:
        self._cache = cache
        self.shape = shape
        self._graphs_only = graphs_only
        self._has_all_slots = shape.batch == cache.num_slots and not shares_slots
        self._num_tokens = shape.batch * shape.width
        device = cache.keys[0].device
        # Each token's id, position, and place where its keys and values are written; then the spans' slots.
        self._inputs = torch.zeros(3 * self._num_tokens + shape.batch, dtype=torch.long).to(device)
        self._all_positions = torch.arange(shape.length).to(device)
        self._masks: dict[int, Tensor] = {}  # window -> [batch, 1, width, length], of the pass that runs

    def fill(self, spans: Sequence[Span]) -> None:
        """Write the next pass into the buffers that the compiled pass reads.

        Padding tokens write their keys and values to a position that no sequence uses, and attend to position 0.
        """
        shape = self.shape
        tokens = np.zeros((3, shape.batch, shape.width), dtype=np.int64)
        tokens[2] = self._cache.max_length
        slots = np.arange(shape.batch) if self._has_all_slots else np.zeros(shape.batch, dtype=np.int64)
        for row, span in self._rows(spans):
            num_tokens = len(span.token_ids)
            first = shape.width - num_tokens if shape.is_prompt else 0
            here = slice(first, first + num_tokens)
            tokens[0, row, here] = span.token_ids
            tokens[1:, row, here] = np.arange(span.start, span.start + num_tokens)
            slots[row] = span.slot
        self._inputs.copy_(torch.from_numpy(np.concatenate([tokens.ravel(), slots])))

    def rows(self, spans: Sequence[Span]) -> list[int]:
        """Return the indices of those rows of this pass's logits that the spans ask for, span by span."""
        if self.shape.is_prompt:
            return [0] * spans[0].num_logits
        return [row * self.shape.width + token for row, span in self._rows(spans) for token in wanted_rows([span])]

    def _rows(self, spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
        """Yield each span with its row in the pass; if a pass has all slots, a slot's row is its number."""
        return ((span.slot if self._has_all_slots else row, span) for row, span in enumerate(spans))

    def logits(self, runner: ModelRunner) -> Tensor:
        """Run the model over the inputs; graphs are made of this call.

        Returns:
            [num_tokens, vocab_size], or [1, vocab_size] for a part of a prompt.
        """
        self._masks.clear()
        inputs = self._inputs[: 2 * self._num_tokens].view(2, self._num_tokens)
        logits = runner.logits(inputs, self, int(self.shape.is_prompt))
        self._masks.clear()  # nothing of a graph outlives its run
        return logits

    def attend(
        self, module: Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, options: Options
    ) -> Tensor:
        """Attend to all positions up to each token's own; shapes are as in `attention.LayerAttention`."""
        shape = self.shape
        layer: int = module.layer_idx  # type: ignore[assignment]
        keys = self._extend(self._cache.keys[layer], key)
        values = self._extend(self._cache.values[layer], value)
        query = query[0].reshape(-1, shape.batch, shape.width, query.shape[3]).transpose(0, 1)
        mask = self._mask(min(options.get("sliding_window") or shape.length, shape.length))
        if self._graphs_only or changes_scores(options):
            attended = scored_attention(query, keys, values, mask, scaling=scaling, options=options)
        else:
            attended = scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
            )
        return attended.transpose(1, 2).flatten(0, 1)[None]  # [1, num_tokens, num_heads, dim]

    def _mask(self, window: int) -> Tensor:
        """Return the mask to add to the scores, [batch, 1, width, length]; layers of one window share it."""
        if window not in self._masks:
            positions = self._of_tokens(1)[:, None, :, None]
            seen = (self._all_positions <= positions) & (self._all_positions > positions - window)
            hidden = torch.zeros(seen.shape, dtype=self._cache.keys[0].dtype, device=seen.device)
            self._masks[window] = hidden.masked_fill(~seen, -torch.inf)
        return self._masks[window]

    def _of_tokens(self, which: int) -> Tensor:
        """Return an input per token, [batch, width]. `which` 0: ids; 1: positions; 2: positions to write keys to."""
        start = which * self._num_tokens
        return self._inputs[start : start + self._num_tokens].view(self.shape.batch, self.shape.width)

    def _extend(self, room: Tensor, new: Tensor) -> Tensor:
        """Write new keys or values to their slots, and return all those that the pass attends to.

        Args:
            room: keys or values of one layer, [num_slots, num_kv_heads, num_positions, dim].
            new: those of the pass's tokens, [1, num_kv_heads, num_tokens, dim].

        Returns:
            [batch, num_kv_heads, length, dim]
        """
        shape, (_, num_heads, num_positions, dim) = self.shape, room.shape
        slots, heads = self._inputs[3 * self._num_tokens :], torch.arange(num_heads, device=room.device)
        rooms = (slots[:, None] * num_heads + heads) * num_positions  # [batch, num_kv_heads]
        places = (rooms[:, :, None] + self._of_tokens(2)[:, None]).flatten()  # [batch * num_kv_heads * width]
        by_row = new[0].reshape(-1, shape.batch, shape.width, dim).transpose(0, 1).reshape(-1, dim)
        if self._graphs_only:  # TorchNeuron's compiler makes of an assignment by index an index per element
            room.view(-1, dim).scatter_(0, places[:, None].expand_as(by_row), by_row)
        else:  # inductor assigns in place; for `scatter_` it copies the whole room twice
            room.view(-1, dim).index_put_((places,), by_row)
        seen = room[:, :, : shape.length]
        return seen if self._has_all_slots else seen.index_select(0, slots)


class StaticPasses:
    """`Passes` that all have fixed shapes, those over prompts too.

    Args:
        fixed: sizes of the shapes, and the maker of their graphs.

    Attributes:
        cache: slots with a spare position after each, to which padding is written.
        maker: maker of the graphs.
        shapes: all shapes that a pass may have.
    """

    def __init__(self, runner: ModelRunner, cache: SlotCache, fixed: FixedShapes) -> None:
        self._runner = runner
        self.cache = cache
        self.maker, self._shares_slots = fixed.maker, fixed.buckets.shares_slots
        self.shapes = Shapes(fixed.buckets, num_slots=cache.num_slots, max_length=cache.max_length)
        self.widest = self.shapes.widths[-1]
        self.widest_part = self.shapes.prompts[-1] if self.shapes.prompts else 0
        self._made: dict[Shape, tuple[StaticPass, Run]] = {}
        self._copy: tuple[SlotCopy, Run] | None = None  # where the device runs nothing but graphs
        if self.maker.graphs_only:
            copy = SlotCopy(cache)
            self._copy = copy, self.maker.make(copy.run)
        self._num_early = 0  # graphs, once all are made

    @property
    def graphs(self) -> GraphCounts:
        """Return how many graphs were made for passes, and how many of them after `warm_up`."""
        num_graphs = self.maker.num_graphs
        return GraphCounts(num_graphs, num_graphs - (self._num_early or num_graphs))

    def warm_up(self) -> None:
        """Make the passes of all shapes by one run of each, and log the progress; overwrites slots."""
        shapes = self.shapes.all()
        started = reported = time.monotonic()
        for num_made, shape in enumerate(shapes):
            if time.monotonic() - reported >= REPORT_EVERY_S:
                reported = time.monotonic()
                logger.info("%d of %d passes %s, %.0f s", num_made, len(shapes), self.maker.name, reported - started)
            self._run(shape, [Span(slot, 0, (0,) * shape.width, 0) for slot in range(shape.batch)])
        self.fork(0, 0, 0, 0)
        seconds = time.monotonic() - started
        logger.info("%d passes %s: %d graphs, %.1f s", len(shapes), self.maker.name, self.maker.num_graphs, seconds)
        self._num_early = self.maker.num_graphs

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Run the spans in as many passes as they need; return the logits that they ask for, [num_rows, vocab_size].

        The rows are in the order of the spans, and within a span in the order of its tokens.
        """
        passes = list(self.shapes.passes(spans))
        if len(passes) == 1:
            return self._run(self.shapes.of(spans), spans)
        rows: dict[int, list[Tensor]] = {span.slot: [] for span in spans}
        for parts in passes:
            logits = self._run(self.shapes.of(parts), parts)
            sizes = [part.num_logits for part in parts]
            for part, of_part in zip(parts, torch.split(logits, sizes), strict=True):
                rows[part.slot].append(of_part)
        return torch.cat([part for span in spans for part in rows[span.slot]])

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1 from one slot to another."""
        if self._copy is None:
            self.cache.fork(source_slot, destination_slot, start, end)
            return
        copy, run = self._copy
        copy.where.copy_(torch.tensor([source_slot, destination_slot, start, end]))
        run()

    def launch(self, shape: Shape, spans: Sequence[Span]) -> tuple[StaticPass, Tensor]:
        """Start one pass of a given shape; return it with the logits of all rows, which may not be computed yet."""
        static, run = self._made.get(shape) or self._make(shape)
        static.fill(spans)
        return static, run()

    def _run(self, shape: Shape, spans: Sequence[Span]) -> Tensor:
        """Run one pass; return a copy of the logits that its spans want, in their order."""
        static, logits = self.launch(shape, spans)
        rows = torch.tensor(static.rows(spans), dtype=torch.long)
        if logits.device.type != "cuda":  # elsewhere a selection is one more thing to compile, per number of rows
            return logits.cpu().index_select(0, rows)
        return logits.index_select(0, rows.to(logits.device, non_blocking=True))

    def _make(self, shape: Shape) -> tuple[StaticPass, Run]:
        kind = {"graphs_only": self.maker.graphs_only, "shares_slots": self._shares_slots}
        static = StaticPass(self.cache, shape, **kind)
        static.fill([])
        self._made[shape] = static, self.maker.make(lambda: static.logits(self._runner))
        return self._made[shape]
