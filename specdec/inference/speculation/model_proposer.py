"""Drafting with a model: one batched pass extends the draft tokens of every sequence, its chain, by one token.

The proposer knows which tokens each slot of the draft model holds. Callers pass whole chains and never roll back: the
proposer finds the longest prefix of a chain that its slot still has, and computes from there. Callers use the target's
token ids; the model reads and scores its own (`specdec.inference.model.token_map`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.model.slots import Array, Backend, ForkingBackend, Span, prompt_chunk_tokens
from specdec.inference.model.token_map import Reading
from specdec.inference.request import SamplingParams
from specdec.inference.sampling.choice import choose_tokens, rank_tokens
from specdec.inference.sampling.penalties import TokensBefore, rows_before, rows_within
from specdec.inference.speculation.grammar import draft_mask, extend_within_grammar
from specdec.inference.tokens import common_length

MAX_CHUNK_TOKENS = 256
"""Longest part of a prompt read in one step, so that a long prompt does not stall the other drafts."""
STAND_IN = 0
"""Id that the draft model reads in place of an id that it lacks: a target's vocabulary may be padded to more ids."""
_Choose = Callable[[Array, Sequence[Draft]], list[DraftToken]]


class ModelProposer:
    """`Proposer` over a model with a KV cache in slots; it samples tokens with the same random numbers as the target.

    Args:
        backend: the model; its slots are divided among sequences and their branches, see `Proposer`.
        num_branches: branches per sequence; a backend that cannot copy slots gets none, since it would compute each
            branch from its sequence's beginning.
    """

    def __init__(self, backend: Backend, *, num_branches: int = 0) -> None:
        self.slots = self._backend = backend  # see `PrefixKeeper`
        self.num_slots, self.max_length = backend.num_slots // (1 + num_branches), backend.max_length
        self._forking = backend if isinstance(backend, ForkingBackend) else None
        self.num_branches = num_branches if self._forking else 0
        self._prompt_chunk = prompt_chunk_tokens(backend)
        self._held: list[Sequence[int]] = [()] * backend.num_slots  # in the model's ids
        self._readings = [Reading() for _ in self._held]

    def begin(self, slot: int, source_slot: int, token_ids: Sequence[int]) -> None:
        """Give a slot to a new sequence, and let it have what is cached of the sequence's first `token_ids`.

        Their keys and values are taken from the best of `source_slot` and the slots of its branches; see
        `PrefixKeeper.begin`.
        """
        self._readings[slot] = Reading(self._readings[source_slot].token_map)
        own_ids = self._readings[slot].of(token_ids)
        source = max(self._family(source_slot), key=lambda each: common_length(self._held[each], own_ids))
        num_held = common_length(self._held[source], own_ids)
        for each in self._family(slot):  # what is left there belongs to another sequence
            self._held[each] = ()
        if source != slot and num_held:
            if self._forking is None:
                return
            self._forking.fork(source, slot, 0, num_held)
        self._held[slot] = own_ids[:num_held]

    def _family(self, slot: int) -> list[int]:
        """Return the slots of the sequence in `slot`: this one, and those of its branches."""
        first = self.num_slots + slot * self.num_branches
        return [slot, *range(first, first + self.num_branches)]

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        """Return per draft one token, or more if its grammar forces them; None if only part of a prompt was read.

        See `Proposer`.
        """
        return extend_within_grammar(drafts, partial(self._extend, choose=_rank if ranked else _choose))

    def _extend(self, drafts: Sequence[Draft], *, choose: _Choose) -> list[list[DraftToken] | None]:
        readings = [(draft, self._read(draft)) for draft in drafts]
        fitting = [each for each in readings if 0 < len(each[1]) <= self.max_length]
        spans, logits = self._forward(fitting) if fitting else ([], None)
        choosing = [draft for (draft, _), span in zip(fitting, spans, strict=True) if span.num_logits]
        chosen = iter(_carried(logits, choosing, choose) if choosing else ())
        results = iter([[next(chosen)] if span.num_logits else None for span in spans])
        return [next(results) if 0 < len(own_ids) <= self.max_length else [] for _, own_ids in readings]

    def _read(self, draft: Draft) -> Sequence[int]:
        """Return the draft model's token ids for a chain; they may be more than a slot of the KV cache can take."""
        if self._readings[draft.slot].token_map != draft.token_map:
            self._readings[draft.slot] = Reading(draft.token_map)
        return self._readings[draft.slot].of(draft.token_ids)

    def _forward(self, readings: Sequence[tuple[Draft, Sequence[int]]]) -> tuple[list[Span], Array]:
        for draft, own_ids in readings:  # all of them before the pass writes to a source
            self._fork(draft, own_ids)
        spans = [self._span(draft.slot, own_ids) for draft, own_ids in readings]
        try:
            logits = self._backend.forward(spans)
        except BaseException:  # the pass may have written anything from `start` on
            for span in spans:
                self._held[span.slot] = self._held[span.slot][: span.start]
            raise
        for (_, own_ids), span in zip(readings, spans, strict=True):
            self._held[span.slot] = own_ids[: span.start + len(span.token_ids)]
        return spans, logits

    def _fork(self, draft: Draft, own_ids: Sequence[int]) -> None:
        """Copy keys and values of a draft's chain from `draft.source_slot` to `draft.slot`, as far as that lacks them.

        That is cheaper than computing them. Nothing happens if there is no source slot, or if the backend cannot copy.

        Args:
            draft: the draft.
            own_ids: the whole chain, in the draft model's ids.
        """
        if self._forking is None or draft.source_slot is None:
            return
        start = common_length(self._held[draft.slot], own_ids)
        end = min(common_length(self._held[draft.source_slot], own_ids), len(own_ids) - 1)
        if end > start:
            self._held[draft.slot] = self._held[draft.slot][:start]
            self._forking.fork(draft.source_slot, draft.slot, start, end)
            self._held[draft.slot] = own_ids[:end]

    def _span(self, slot: int, own_ids: Sequence[int]) -> Span:
        last = len(own_ids) - 1
        start = min(common_length(self._held[slot], own_ids), last)
        if start == last:  # nearly always; a slice takes 1 us longer
            token_ids = [own_ids[last]]
        else:
            token_ids = [*own_ids[start : start + (self._prompt_chunk or MAX_CHUNK_TOKENS)]]
        reaches_end = start + len(token_ids) > last
        if max(token_ids) >= self._backend.vocab_size:
            token_ids = [token_id if token_id < self._backend.vocab_size else STAND_IN for token_id in token_ids]
        return Span(slot=slot, start=start, token_ids=token_ids, num_logits=int(reaches_end))


def _carried(logits: Array, drafts: Sequence[Draft], choose: _Choose) -> list[DraftToken]:
    """Choose a token per draft, each from its row of logits, which is first reordered to the target's token ids.

    Args:
        logits: float [number of drafts, number of the draft model's ids].
        drafts: the drafts; their targets may have several tokenizers.
        choose: function that chooses from rows in the target's order.
    """
    maps = {draft.token_map for draft in drafts}
    if len(maps) == 1:
        return choose(maps.pop().carry(logits), drafts)
    chosen: dict[int, DraftToken] = {}
    for token_map in maps:
        rows = [row for row, draft in enumerate(drafts) if draft.token_map == token_map]
        chosen |= zip(rows, choose(token_map.carry(logits[rows]), [drafts[row] for row in rows]), strict=True)
    return [chosen[row] for row in range(len(drafts))]


def _choose(logits: Array, drafts: Sequence[Draft]) -> list[DraftToken]:
    return [*map(DraftToken, choose_tokens(logits, *_choices(drafts)))]


def _rank(logits: Array, drafts: Sequence[Draft]) -> list[DraftToken]:
    return [_ranked(*best, *next_best) for best, next_best in rank_tokens(logits, *_choices(drafts), count=2)]


def _ranked(token_id: int, score: float, runner_up: int, next_score: float) -> DraftToken:
    """Return a draft token with its runner-up and margin; a runner-up with a score of minus infinity is left out."""
    return DraftToken(token_id, runner_up if next_score > -math.inf else None, score - next_score)


def _choices(drafts: Sequence[Draft]) -> tuple[list[SamplingParams], list[int], list[TokensBefore] | None]:
    """Return what `choose_tokens` needs for the drafts' next tokens: sampling parameters, positions, tokens before.

    The tokens before are None if no draft needs them.
    """
    before = None
    if any(draft.grammar is not None or draft.sampling.penalizes for draft in drafts):
        before = [row for draft in drafts for row in rows_before(draft)]
        before = rows_within(before, [draft_mask(draft) for draft in drafts])
    return [draft.sampling for draft in drafts], [len(draft.token_ids) for draft in drafts], before
