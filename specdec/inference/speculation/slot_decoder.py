"""Decoder over a model whose KV cache has slots: one target pass over many sequences, with draft tokens or without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import array_api_compat

from specdec.inference.errors import InternalError
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.model.slots import Array, Backend, ForkingBackend, Span, prompt_chunk_tokens
from specdec.inference.request import SamplingParams
from specdec.inference.sampling.choice import audit_tokens, choose_tokens
from specdec.inference.sampling.logprobs import token_logprobs
from specdec.inference.sampling.penalties import TokensBefore, rows_before, rows_within
from specdec.inference.speculation.grammar import Allowed, allowed_by_grammar, fit
from specdec.inference.speculation.verify import verify

_NOTHING = Verdict(token_ids=(), num_draft_tokens=0, num_accepted_tokens=0)


class SlotDecoder:
    """`Decoder` over a model with slots: one pass of the model serves the turns of all sequences.

    For attributes see `Decoder`.
    """

    keeps_grammars = True

    def __init__(self, backend: Backend) -> None:
        self.slots = self._backend = backend  # see `PrefixKeeper`
        self.vocab_size, self.num_slots, self.max_length = backend.vocab_size, backend.num_slots, backend.max_length
        self.prompt_chunk_tokens = prompt_chunk_tokens(backend)

    def begin(self, slot: int, source_slot: int, token_ids: Sequence[int]) -> None:
        """Give a slot to a new sequence, and copy its first tokens from `source_slot` if that is another slot."""
        if source_slot != slot and isinstance(self._backend, ForkingBackend):
            self._backend.fork(source_slot, slot, 0, len(token_ids))

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Run one pass and verify each turn's proposal, after its grammar has cut or extended it."""
        fitted = [fit(turn) for turn in turns]
        turns = [each.turn for each in fitted]
        verdicts = self._verdicts(turns, self._backend.forward([_span(turn) for turn in turns]))
        return [each.counted(verdict) for each, verdict in zip(fitted, verdicts, strict=True)]

    def _verdicts(self, turns: Sequence[Turn], logits: Array) -> list[Verdict]:
        if not any(turn.scored for turn in turns):
            return decide(turns, logits)
        scores, logits = _scores(turns, logits)
        verdicts = decide(turns, logits)
        return [replace(verdict, **score) for verdict, score in zip(verdicts, scores, strict=True)]


def decide(turns: Sequence[Turn], logits: Array) -> list[Verdict]:
    """Choose the target's token for every row of logits, and verify each turn's proposal.

    Args:
        turns: the turns of a pass, with their final proposals.
        logits: float32 [num_rows, vocab_size]: for each turn that chooses a token, in order, the row of its last
            committed token and one row per token of its proposal.

    Returns:
        One verdict per turn, without log-probabilities of prompt tokens.
    """
    choosing = [turn for turn in turns if turn.chooses]
    if choosing:
        _require_finite(logits, choosing)
    allowed = [allowed_by_grammar(turn) for turn in turns]
    chosen = iter(choose(logits, [each for each in zip(turns, allowed, strict=True) if each[0].chooses]))
    verdicts = [_verdict(turn, chosen, each) for turn, each in zip(turns, allowed, strict=True)]
    return _with_logprobs(turns, verdicts, logits)


def _scores(turns: Sequence[Turn], logits: Array) -> tuple[list[dict[str, Any]], Array]:
    """Compute the log-probabilities or audits of the prompt tokens that turns ask for, by their rows of logits.

    Args:
        turns: the turns of a pass; `Turn.scored` has the tokens.
        logits: float32 [num_rows, vocab_size]; the rows of all turns, in order.

    Returns:
        Per turn, the fields of its `Verdict` that have the results; and the rows from which tokens are chosen.
    """
    scores: list[dict[str, Any]] = []
    kept: list[int] = []
    end = 0
    for turn in turns:
        start, end = end, end + _num_logits(turn)
        rows = logits[start : start + len(turn.scored)]  # [num_scored, vocab_size]
        scores.append(_score(turn, rows) if turn.scored else {})
        kept.extend(range(end - _num_choices(turn), end))
    return scores, logits[kept]


def _score(turn: Turn, rows: Array) -> dict[str, Any]:
    """Return the fields of a turn's `Verdict` that have the log-probabilities or audits of its `scored` tokens.

    Args:
        turn: a turn with `scored` tokens.
        rows: float32 [number of scored tokens, vocab_size]; row i scores token i.
    """
    if not turn.audits:
        return {"prompt_logprobs": token_logprobs(rows, turn.scored, turn.prompt_logprobs)}
    start = max(turn.start + 1, turn.output_start)  # position of the first token that is audited
    skipped = start - turn.start - 1
    tokens, before_it = turn.scored[skipped:], turn.token_ids[turn.output_start : start]
    if not tokens or (turn.grammar is not None and not turn.grammar.goes_on(before_it)):  # it has refused one
        return {}
    begun = replace(turn, token_ids=turn.token_ids[:start], proposal=tokens, chooses=True, audits=False, tally=None)
    allowed = allowed_by_grammar(begun)
    if allowed.error is not None:
        return {"error": allowed.error}
    before = rows_before(begun, tokens)[: len(tokens)]
    if allowed.masks is not None:
        masks = [mask for mask in allowed.masks[: len(tokens)] if mask is not None]  # a refused token is the last
        before = rows_within(before[: len(masks)], masks)
    tokens, rows = tokens[: len(before)], rows[skipped : skipped + len(before)]
    positions = range(start, start + len(tokens))
    return {"audits": audit_tokens(rows, [turn.sampling] * len(tokens), positions, before, tokens)}


def rows_not_finite(logits: Array) -> list[int]:
    """Return the numbers of the rows whose maximum is not finite: from them, the first NaN or token 0 would be chosen.

    Args:
        logits: float [num_rows, vocab_size].
    """
    xp = array_api_compat.array_namespace(logits)
    finite = xp.isfinite(xp.max(logits, axis=-1))  # [num_rows]; a NaN is the maximum of its row
    return [] if bool(xp.all(finite)) else [row for row, good in enumerate(finite.tolist()) if not good]


def _require_finite(logits: Array, turns: Sequence[Turn]) -> None:
    """Raise InternalError if any row's maximum is not finite; the message names the first such position and counts.

    Args:
        logits: float [num_rows, vocab_size]; the rows of `choose`.
        turns: the turns that they belong to, all of which choose.
    """
    if not (bad := rows_not_finite(logits)):
        return
    positions = [len(turn.token_ids) + i for turn in turns for i in range(_num_choices(turn))]
    first, counts = positions[bad[0]], f"{len(bad)} of {len(positions)}"
    raise InternalError(f"the model's logits are not finite at position {first}, and at {counts}")


def choose(logits: Array, turns: Sequence[tuple[Turn, Allowed]]) -> list[int]:
    """Choose the target's token from every row of logits, among the tokens that the turns' grammars allow.

    Args:
        logits: float [num_rows, vocab_size]: for each turn, in order, one row and one more per token of its proposal.
        turns: turns that choose, each with what its grammar allows.
    """
    sampling: list[SamplingParams] = []
    positions: list[int] = []
    before: list[TokensBefore] = []
    for turn, allowed in turns:
        sampling.extend([turn.sampling] * _num_choices(turn))
        positions.extend(range(len(turn.token_ids), len(turn.token_ids) + _num_choices(turn)))
        rows = rows_before(turn, turn.proposal)
        before.extend(rows if allowed.masks is None else rows_within(rows, allowed.masks))
    return choose_tokens(logits, sampling, positions, before) if sampling else []


def _with_logprobs(turns: Sequence[Turn], verdicts: list[Verdict], logits: Array) -> list[Verdict]:
    """Add log-probabilities to the verdicts of the turns that ask for them, in the list; return the list.

    `logits` has the rows of `decide`.
    """
    row = 0
    for i, (turn, verdict) in enumerate(zip(turns, verdicts, strict=True)):
        if turn.logprobs is not None and verdict.token_ids:
            rows = logits[row : row + len(verdict.token_ids)]  # [num_tokens, vocab_size]
            verdicts[i] = replace(verdict, logprobs=token_logprobs(rows, verdict.token_ids, turn.logprobs))
        row += _num_choices(turn)
    return verdicts


def _num_choices(turn: Turn) -> int:
    return len(turn.proposal) + 1 if turn.chooses else 0


def _num_logits(turn: Turn) -> int:
    return turn.num_unread + len(turn.proposal) if turn.scored else _num_choices(turn)


def _span(turn: Turn) -> Span:
    token_ids = [*turn.token_ids[turn.start :], *turn.proposal]
    return Span(slot=turn.slot, start=turn.start, token_ids=token_ids, num_logits=_num_logits(turn))


def _verdict(turn: Turn, chosen: Iterator[int], allowed: Allowed) -> Verdict:
    tokens = [next(chosen) for _ in range(_num_choices(turn))]
    if allowed.error is not None:
        return replace(_NOTHING, error=allowed.error)
    return allowed.cut(verify(tokens, turn.proposal)) if turn.chooses else _NOTHING
