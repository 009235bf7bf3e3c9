"""The operations of a model over its slots: passes over spans, copies of slots and the warm-up.

`TorchBackend` checks its callers' spans, and hands every operation to one object of `Passes`. So if a model were spread
over several devices, a wrapper of that object would see every operation that all devices must run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.inference.backends.pytorch.attention import SlotPass
from specdec.inference.backends.pytorch.runner import ModelRunner
from specdec.inference.backends.pytorch.slot_cache import SlotCache
from specdec.inference.backends.spans import wanted_rows
from specdec.inference.model.slots import GraphCounts, Span


class Passes(Protocol):
    """The operations of a model over its slots.

    Attributes:
        widest: most tokens of one span that one pass runs with all their logits.
        widest_part: most tokens of a part of a prompt that one pass runs; 0 is any number.
    """

    widest: int
    widest_part: int

    @property
    def graphs(self) -> GraphCounts:
        """Return how many graphs were made for passes."""

    def warm_up(self) -> None:
        """Make the graphs of all passes, if passes have fixed shapes; this overwrites slots."""

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Run spans of distinct slots; return the logits that they ask for, [num_rows, vocab_size], in the model dtype.

        The rows are in the order of `specdec.inference.model.slots.Backend.forward`.
        """

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1 from one slot to another."""


class EagerPasses:
    """Passes of any shape, operator by operator; the tokens of all spans run as one row.

    Args:
        num_rows: number of tokens to which every pass is filled up, by tokens 0 that attend to nothing; 0: a pass has
            as many tokens as its spans.
    """

    graphs = GraphCounts(0, 0)
    widest_part = 0

    def __init__(self, runner: ModelRunner, cache: SlotCache, num_rows: int = 0) -> None:
        self._runner = runner
        self._cache = cache
        self._num_rows = num_rows
        self.widest = cache.max_length

    def warm_up(self) -> None:
        """Do nothing: these passes need no graphs."""

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Run one pass over spans of distinct slots; return logits in the model's dtype, [num_rows, vocab_size]."""
        dtype, device = self._cache.keys[0].dtype, self._cache.keys[0].device
        token_ids = [token_id for span in spans for token_id in span.token_ids]
        positions = [position for span in spans for position in range(span.start, span.start + len(span.token_ids))]
        filling = [0] * (self._num_rows - len(token_ids))
        inputs = torch.tensor([token_ids + filling, positions + filling]).to(device, non_blocking=True)  # [2, num_rows]
        slot_pass = SlotPass(self._cache, spans, dtype=dtype, device=device, num_filling=len(filling))
        rows = wanted_rows(spans)
        if rows and self._num_rows:
            return self._runner.logits(inputs, slot_pass)[rows]
        if rows:
            return self._runner.logits(inputs, slot_pass, 0 if len(rows) == len(token_ids) else rows)
        self._runner.read(inputs, slot_pass)
        return torch.empty(0, self._runner.vocab_size, dtype=dtype, device=device)

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1 from one slot to another."""
        self._cache.fork(source_slot, destination_slot, start, end)
