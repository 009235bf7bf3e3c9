"""Functions that every backend applies to the spans of a pass. They know no model.

One checks that the caller kept the contract of `Backend.forward`; the other finds the rows that are to have logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.inference.model.slots import Backend, Span


def check_spans(spans: Sequence[Span], backend: Backend) -> None:
    """Raise ValueError if the caller broke the contract of `Backend.forward`."""
    if not spans:
        raise ValueError("a pass needs at least one span")
    if len({span.slot for span in spans}) != len(spans):
        raise ValueError(f"spans share a slot: {[span.slot for span in spans]}")
    num_slots, max_length, vocab_size = backend.num_slots, backend.max_length, backend.vocab_size
    for span in spans:
        num_tokens = len(span.token_ids)
        if not 0 <= span.slot < num_slots:
            raise ValueError(f"slot {span.slot} is outside 0..{num_slots - 1}")
        if not 0 <= span.num_logits <= num_tokens:
            raise ValueError(f"num_logits {span.num_logits} is outside 0..{num_tokens}")
        if num_tokens == 0 or span.start < 0 or span.start + num_tokens > max_length:
            raise ValueError(f"{num_tokens} tokens from {span.start} do not fit into {max_length} positions")
        # An embedding does not check on CUDA: it takes the process down.
        if min(span.token_ids) < 0 or max(span.token_ids) >= vocab_size:
            wrong = next(token_id for token_id in span.token_ids if not 0 <= token_id < vocab_size)
            raise ValueError(f"token id {wrong} is outside 0..{vocab_size - 1}")


def wanted_rows(spans: Sequence[Span]) -> list[int]:
    """Return the numbers of the tokens that are to have logits, counted from 0 through all spans, span after span."""
    rows: list[int] = []
    end = 0
    for span in spans:
        end += len(span.token_ids)
        rows.extend(range(end - span.num_logits, end))
    return rows
