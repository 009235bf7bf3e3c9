"""Drafting with a model: one batched pass extends every chain by one token.

Owns the content of each slot of the draft model. Callers pass whole chains and never roll back: the proposer finds the
longest prefix that its slot still has, and writes from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import array_api_compat

from inference.model.proposer import Draft, DraftToken
from inference.model.slots import Array, Backend, ForkingBackend, Span, prompt_chunk_tokens
from inference.request import SamplingParams
from inference.sampling.choice import choose_tokens, rank_tokens
from inference.sampling.penalties import TokensBefore, rows_before, rows_within
from inference.speculation.grammar import draft_mask, extend_within_grammar
from inference.tokens import common_length

MAX_CHUNK_TOKENS = 256
"""Longest part of a prompt read in one step, so that a long prompt does not stall the other drafts."""
STAND_IN = 0
"""Id that the model reads in place of one that it lacks: its target's vocabulary may be padded to more ids."""
_Choose = Callable[[Array, Sequence[Draft]], list[DraftToken]]


class ModelProposer:
    """The `Proposer` over a slot model; draws with the target's noise, from the draft's logits.

    Args:
        backend: the slot model; its slots are divided among sequences and their branches, see `Proposer`.
        num_branches: branches per sequence; a backend that cannot fork has none, since it would read them in full.
    """

    def __init__(self, backend: Backend, *, num_branches: int = 0) -> None:
        self.slots = self._backend = backend  # see `PrefixKeeper`
        self.num_slots, self.max_length = backend.num_slots // (1 + num_branches), backend.max_length
        self._forking = backend if isinstance(backend, ForkingBackend) else None
        self.num_branches = num_branches if self._forking else 0
        self._prompt_chunk = prompt_chunk_tokens(backend)
        self._held: list[Sequence[int]] = [()] * backend.num_slots

    def begin(self, slot: int, source_slot: int, token_ids: Sequence[int]) -> None:
        """See `PrefixKeeper`; `source_slot` may hold less of the tokens, and a branch of its sequence more."""
        source = max(self._family(source_slot), key=lambda each: common_length(self._held[each], token_ids))
        num_held = common_length(self._held[source], token_ids)
        for each in self._family(slot):  # what is left there belongs to another sequence
            self._held[each] = ()
        if source != slot and num_held:
            if self._forking is None:
                return
            self._forking.fork(source, slot, 0, num_held)
        self._held[slot] = token_ids[:num_held]

    def _family(self, slot: int) -> list[int]:
        """Return a sequence's slot, and those of its branches."""
        first = self.num_slots + slot * self.num_branches
        return [slot, *range(first, first + self.num_branches)]

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        """Return a token per draft, more if its grammar forces them, or None if only a part of a prompt was read."""
        return extend_within_grammar(drafts, partial(self._extend, choose=_rank if ranked else _choose))

    def _extend(self, drafts: Sequence[Draft], *, choose: _Choose) -> list[list[DraftToken] | None]:
        spans, logits = self._forward(drafts)
        choosing = [draft for draft, span in zip(drafts, spans, strict=True) if span.num_logits]
        chosen = iter(choose(_of_targets(logits, choosing), choosing) if choosing else ())
        return [[next(chosen)] if span.num_logits else None for span in spans]

    def _forward(self, drafts: Sequence[Draft]) -> tuple[list[Span], Array]:
        for draft in drafts:  # all of them before the pass writes to a source
            self._fork(draft)
        spans = [self._span(draft) for draft in drafts]
        try:
            logits = self._backend.forward(spans)
        except BaseException:  # the pass may have written anything from `start` on
            for span in spans:
                self._held[span.slot] = self._held[span.slot][: span.start]
            raise
        for draft, span in zip(drafts, spans, strict=True):
            self._held[draft.slot] = draft.token_ids[: span.start + len(span.token_ids)]
        return spans, logits

    def _fork(self, draft: Draft) -> None:
        """Copy what the source slot holds of a draft's tokens beyond what its own does: cheaper than any pass."""
        if self._forking is None or draft.source_slot is None:
            return
        start = common_length(self._held[draft.slot], draft.token_ids)
        end = min(common_length(self._held[draft.source_slot], draft.token_ids), len(draft.token_ids) - 1)
        if end > start:
            self._held[draft.slot] = self._held[draft.slot][:start]
            self._forking.fork(draft.source_slot, draft.slot, start, end)
            self._held[draft.slot] = draft.token_ids[:end]

    def _span(self, draft: Draft) -> Span:
        last = len(draft.token_ids) - 1
        start = min(common_length(self._held[draft.slot], draft.token_ids), last)
        if start == last:  # nearly always; a slice takes 1 us longer
            token_ids = [draft.token_ids[last]]
        else:
            token_ids = [*draft.token_ids[start : start + (self._prompt_chunk or MAX_CHUNK_TOKENS)]]
        reaches_end = start + len(token_ids) > last
        if max(token_ids) >= self._backend.vocab_size:
            token_ids = [token_id if token_id < self._backend.vocab_size else STAND_IN for token_id in token_ids]
        return Span(slot=draft.slot, start=start, token_ids=token_ids, num_logits=int(reaches_end))


def _of_targets(logits: Array, drafts: Sequence[Draft]) -> Array:
    """Return the logits, one row per draft, with minus infinity for ids that the draft's target lacks."""
    num_ids = logits.shape[-1]
    sizes = [num_ids if draft.vocab_size is None else draft.vocab_size for draft in drafts]
    if min(sizes) >= num_ids:
        return logits
    cut = array_api_compat.array_namespace(logits).asarray(logits, copy=True)
    for row, size in enumerate(sizes):
        cut[row, size:] = -math.inf
    return cut


def _choose(logits: Array, drafts: Sequence[Draft]) -> list[DraftToken]:
    return [*map(DraftToken, choose_tokens(logits, *_choices(drafts)))]


def _rank(logits: Array, drafts: Sequence[Draft]) -> list[DraftToken]:
    return [_ranked(*best, *next_best) for best, next_best in rank_tokens(logits, *_choices(drafts), count=2)]


def _ranked(token_id: int, score: float, runner_up: int, next_score: float) -> DraftToken:
    """Return a draft token; a runner-up that truncation or a grammar removed does not count."""
    return DraftToken(token_id, runner_up if next_score > -math.inf else None, score - next_score)


def _choices(drafts: Sequence[Draft]) -> tuple[list[SamplingParams], list[int], list[TokensBefore] | None]:
    """Return the sampling, position and preceding tokens of each draft's next token: one row of logits each."""
    before = None
    if any(draft.grammar is not None or draft.sampling.penalizes for draft in drafts):
        before = [row for draft in drafts for row in rows_before(draft)]
        before = rows_within(before, [draft_mask(draft) for draft in drafts])
    return [draft.sampling for draft in drafts], [len(draft.token_ids) for draft in drafts], before
