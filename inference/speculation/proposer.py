"""Drafting with a model: one batched pass extends every chain by one token.

Owns what each slot of the draft model holds. Callers hand over whole chains and never say "roll back": the proposer
finds the longest prefix its slot still has, and writes from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference.capabilities import prompt_chunk_tokens
from inference.penalties import rows_before
from inference.sampling import choose_tokens
from inference.types import Backend, Draft, Span

MAX_CHUNK_TOKENS = 256
"""Longest part of a prompt read in one step, so that a long prompt does not stall the other drafts."""


class ModelProposer:
    """The `Proposer` over a slot model; draws with the target's noise, from the draft's logits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._prompt_chunk = prompt_chunk_tokens(backend, default=0)
        self._held: list[list[int]] = [[] for _ in range(backend.num_slots)]

    @property
    def num_slots(self) -> int:
        return self._backend.num_slots

    @property
    def max_length(self) -> int:
        return self._backend.max_length

    def extend(self, drafts: Sequence[Draft]) -> list[list[int] | None]:
        """One token per draft, or None where a part of a prompt was read."""
        spans = [self._span(draft) for draft in drafts]
        logits = self._backend.forward(spans)
        for draft, span in zip(drafts, spans, strict=True):
            self._held[draft.slot] = list(draft.token_ids[: span.start + len(span.token_ids)])
        choosing = [draft for draft, span in zip(drafts, spans, strict=True) if span.num_logits]
        chosen = iter(self._choose(logits, choosing))
        return [[next(chosen)] if span.num_logits else None for span in spans]

    def _span(self, draft: Draft) -> Span:
        start = min(_common_prefix(self._held[draft.slot], draft.token_ids), len(draft.token_ids) - 1)
        token_ids = draft.token_ids[start : start + (self._prompt_chunk or MAX_CHUNK_TOKENS)]
        reaches_end = start + len(token_ids) == len(draft.token_ids)
        return Span(slot=draft.slot, start=start, token_ids=token_ids, num_logits=int(reaches_end))

    def _choose(self, logits: object, drafts: Sequence[Draft]) -> list[int]:
        if not drafts:
            return []
        before = [
            row
            for draft in drafts
            for row in rows_before(draft.token_ids, (), output_start=draft.output_start, sampling=draft.sampling)
        ]
        positions = [len(draft.token_ids) for draft in drafts]
        return choose_tokens(logits, [draft.sampling for draft in drafts], positions, before)


def _common_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(held), len(wanted))
    if held[:length] == list(wanted[:length]):  # the usual case, at C speed
        return length
    return next(i for i in range(length) if held[i] != wanted[i])
