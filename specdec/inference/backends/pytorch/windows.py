"""Passes in windows: each position is always in the same row of its window, in a pass with a fixed number of windows.

In bfloat16 and float16 the last bits of a token's logits depend on how many rows a pass has, and on its neighbours: a
kernel is chosen by the number of rows, and attention's by the number of queries. Draft tokens decide where spans begin
and end, so a draft could change the choice between two nearly equal tokens. Two things prevent it: windows begin at
multiples of their width, and a pass that has fewer windows than its number is filled up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.inference.backends.pytorch.passes import Passes
from specdec.inference.config import ModelConfig
from specdec.inference.model.slots import GraphCounts, Span, Windows

logger = logging.getLogger(__name__)

WIDTH = 16
"""Positions of a window. Narrower ones cut proposals short more often, and read prompts in more passes."""

MAX_WINDOWS = 16
"""Most windows of a pass; further sequences take another pass. 256 rows cost no time on a device that needs longer to
read the weights than to compute with them."""


class WindowPasses:
    """`Passes` that extend every span to whole windows. A pass may have several windows of one slot, in order.

    Args:
        inner: passes that run the windows, up to `windows.num` at a time, and fill up what is missing.
    """

    widest_part = 0

    def __init__(self, inner: Passes, windows: Windows, *, num_slots: int, max_length: int) -> None:
        self._inner, self._sizes = inner, windows
        self._token_ids = np.zeros((num_slots, max_length), dtype=np.int32)  # that the slots' positions hold
        self.widest = max_length

    @property
    def graphs(self) -> GraphCounts:
        """Return how many graphs were made for passes."""
        return self._inner.graphs

    def warm_up(self) -> None:
        """Make the graphs of all passes, if passes have fixed shapes; this overwrites slots."""
        self._inner.warm_up()

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys, values and token ids of the positions start .. end-1 from one slot to another."""
        self._token_ids[destination_slot, start:end] = self._token_ids[source_slot, start:end]
        self._inner.fork(source_slot, destination_slot, start, end)

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Run the windows of the spans; return logits in the order of the spans, as `Passes.forward` does."""
        windows = [window for span in spans for window in self._windows(span)]
        size = self._sizes.num
        return torch.cat([self._run(windows[first : first + size]) for first in range(0, len(windows), size)])

    def _windows(self, span: Span) -> Iterator[tuple[Span, range]]:
        """Note a span's tokens; yield its windows, each with those of its rows, from 0, whose logits the span wants.

        The rows after the span's end have no meaning, and later spans overwrite them. If the number of a slot's
        positions is no multiple of the width, its last window is narrower in every pass.
        """
        tokens, end, width = self._token_ids[span.slot], span.start + len(span.token_ids), self._sizes.width
        tokens[span.start : end] = span.token_ids
        for start in range(span.start - span.start % width, end, width):
            token_ids = tokens[start : start + width].tolist()
            wanted = range(max(end - span.num_logits, start) - start, min(end - start, width))
            yield Span(span.slot, start, token_ids, len(token_ids)), wanted

    def _run(self, windows: Sequence[tuple[Span, range]]) -> Tensor:
        """Run one pass over windows, each with its wanted rows; return the logits of these rows.

        The output layer gets all rows or none, since the choice of its kernel too depends on the number of rows.
        """
        spans = [span for span, _ in windows]
        rows, end = [], 0
        for span, wanted in windows:
            rows += [end + row for row in wanted]
            end += len(span.token_ids)
        if not rows:
            spans = [Span(span.slot, span.start, span.token_ids, 0) for span in spans]
        logits = self._inner.forward(spans)  # [rows of the windows, vocab_size], or [0, vocab_size]
        return logits[torch.tensor(rows, dtype=torch.long, device=logits.device)]


def choose_windows(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, has_experts: bool
) -> Windows | None:
    """Return the windows of a model's passes, as `--exact` says, and log what they cost or what is lost without them.

    Args:
        has_experts: whether tokens choose among experts, whose numbers of rows no window fixes.

    Returns:
        The windows; None if passes compute just the tokens of their spans.
    """
    if config.exact == "never" or (config.exact == "auto" and dtype not in (torch.bfloat16, torch.float16)):
        return None
    windows, num_slots = Windows(WIDTH, min(config.num_slots, MAX_WINDOWS)), config.num_slots
    if config.exact == "auto" and device.type != "cpu" and num_slots > MAX_WINDOWS + 1:  # one may be a spare slot
        lost = "one token in 100 may depend on drafts, on other requests and on kept prefixes"
        cost = f"--exact always prevents it, and takes a pass for every {MAX_WINDOWS} requests"
        logger.warning("model %s with %d slots in %s: %s; %s", config.name, num_slots, dtype, lost, cost)
        return None
    cost = ", and on a CPU takes as long for one request as for all" if device.type == "cpu" else ""
    text = (
        "model %s: every pass has %d windows of %d positions, so that no draft changes the text%s (docs/speculation.md)"
    )
    logger.info(text, config.name, windows.num, windows.width, cost)
    if has_experts:
        logger.warning(
            "model %s has experts, whose rows no window fixes: drafts may still change its text", config.name
        )
    return windows
