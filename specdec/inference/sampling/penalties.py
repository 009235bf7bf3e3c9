"""Bias, penalties and grammar: changes to single logits before the choice, by request and by the tokens so far.

This module has the arithmetic, and counts the tokens; sampling and truncation are elsewhere. The order is vLLM's, and
Transformers' as far as Transformers has these changes:

    logit_bias            logit + bias
    repetition_penalty    tokens in prompt or output: logit / penalty if it is above 0, else logit * penalty
    frequency_penalty     logit - penalty * occurrences in the output
    presence_penalty      logit - penalty, if the token is in the output
    held_back             minus infinity for the tokens that may end the sequence, before the position where it may end
    grammar               minus infinity, if the token may not follow: the caller makes the masks

Other logits keep their values. All is computed in double precision and by single IEEE operations, so numpy and torch
give the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from specdec.inference.model.decoder import Turn
from specdec.inference.model.proposer import Draft
from specdec.inference.model.slots import Array
from specdec.inference.request import MinLengthSampling, SamplingParams
from specdec.inference.tokens import Tally, logged

MIN_DIVISOR = 1e-100
"""Least divisor of scores, as a repetition penalty and as a temperature; smaller divisors are raised to it.

By a smaller one scores could become infinite, and then NaN. Raising it changes no order: a float32 logit divided by
this number is already above, or below, all logits that are not divided.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TokensBefore:
    """Record of the tokens before a row of logits, by which penalties and a grammar change the choice from the row.

    Attributes:
        token_ids: int64 [num_seen], ascending: the ids in prompt or output.
        counts: int64 [num_seen]: how often each id is in the output, draft tokens before the row included.
        in_prompt: bool [num_seen]: whether each id is in the prompt.
        allowed: mask of the ids that the grammar allows, as `Matcher.masks` gives it; None if all are allowed.
    """

    token_ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    in_prompt: npt.NDArray[np.bool_]
    allowed: bytes | None = None

    @classmethod
    def of(cls, token_ids: Sequence[int], output_start: int, tally: Tally | None = None) -> TokensBefore:
        """Count the tokens of a sequence.

        Args:
            token_ids: the sequence.
            output_start: position of the first output token.
            tally: counts of the same sequence from earlier calls, so that only new tokens are counted; None: all are.
        """
        log, drafts = logged(token_ids)
        row = cls(*(tally or Tally(output_start)).count(log))
        for token_id in drafts:
            row = row.followed_by(token_id)
        return row

    def followed_by(self, token_id: int) -> TokensBefore:
        """Return a record of the same tokens and one more output token, `token_id`; this record is not changed."""
        row = self.with_ids([token_id])
        counts = row.counts.copy()
        counts[np.searchsorted(row.token_ids, token_id)] += 1
        return replace(row, counts=counts)

    def with_ids(self, token_ids: Sequence[int]) -> TokensBefore:
        """Return a record that also has entries for `token_ids`; a new entry has the count 0."""
        merged = np.union1d(self.token_ids, np.asarray(token_ids, dtype=np.int64))
        if len(merged) == len(self.token_ids):
            return self
        places = np.searchsorted(merged, self.token_ids)
        counts, in_prompt = np.zeros(len(merged), dtype=np.int64), np.zeros(len(merged), dtype=bool)
        counts[places], in_prompt[places] = self.counts, self.in_prompt
        return TokensBefore(merged, counts, in_prompt, self.allowed)


NONE_BEFORE = TokensBefore.of((), 0)


def rows_before(span: Turn | Draft, proposal: Sequence[int] = ()) -> list[TokensBefore]:
    """Return, for each row of logits, the record of the tokens before it.

    The first row follows the tokens of `span`, and each further row one more token of `proposal`. Without penalties,
    the records are empty.
    """
    if not span.sampling.penalizes:
        return [NONE_BEFORE] * (len(proposal) + 1)
    rows = [TokensBefore.of(span.token_ids, span.output_start, span.tally)]
    for token_id in proposal:
        rows.append(rows[-1].followed_by(token_id))
    return rows


def rows_within(rows: Sequence[TokensBefore], masks: Sequence[bytes | None]) -> list[TokensBefore]:
    """Return copies of the records, each with the grammar's mask for its row as `allowed`.

    There may be fewer masks than rows: rows beyond the last mask get None, which allows all tokens.
    """
    return [replace(row, allowed=mask) for row, mask in itertools.zip_longest(rows, masks)]


def adjusts(sampling: Sequence[SamplingParams], before: Sequence[TokensBefore] | None) -> bool:
    """Return whether bias, penalties, a minimum length or a grammar change any row's logits."""
    return any(
        params.penalizes or params.logit_bias or isinstance(params, MinLengthSampling) for params in sampling
    ) or (before is not None and any(row.allowed is not None for row in before))


def hold_back(scores: Array, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> Array:
    """Set the scores of tokens that would end an output below its minimum length to minus infinity, in place.

    Args:
        scores: float [num_rows, vocab_size].
        sampling: one per row.
        positions: per row, the position in the sequence, prompt included, of the token to choose.

    Returns:
        The scores.
    """
    vocab_size = scores.shape[-1]
    for row, (params, position) in enumerate(zip(sampling, positions, strict=True)):
        if isinstance(params, MinLengthSampling) and position < params.until:
            scores[row, [token_id for token_id in params.held_back if token_id < vocab_size]] = -math.inf
    return scores


def adjust_logits(logits: Array, sampling: Sequence[SamplingParams], before: Sequence[TokensBefore]) -> Array:
    """Apply bias, penalties and grammars.

    Args:
        logits: float [num_rows, vocab_size].
        sampling, before: one per row.

    Returns:
        float64 [num_rows, vocab_size], a copy.
    """
    xp = array_api_compat.array_namespace(logits)
    scores = xp.asarray(logits, dtype=xp.float64, copy=True)
    if any(params.penalizes or params.logit_bias for params in sampling):  # else a grammar alone
        _adjust(scores, [_entries(*row) for row in zip(sampling, before, strict=True)])
    mask_scores(scores, [row.allowed for row in before])
    return scores


def mask_scores(scores: Array, masks: Sequence[bytes | None]) -> None:
    """Set the scores of tokens that are not allowed to minus infinity, in place.

    Args:
        scores: float [num_rows, vocab_size].
        masks: per row, one bit per token id, lowest first; None allows all. Ids beyond a mask are not allowed.
    """
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    xp = array_api_compat.array_namespace(scores)
    bits = np.stack([np.frombuffer(mask, dtype=np.uint8) for mask in masks if mask is not None])
    allowed = np.unpackbits(bits, axis=-1, count=scores.shape[-1], bitorder="little").astype(bool)
    where = xp.asarray(allowed, device=array_api_compat.device(scores))  # [len(rows), vocab_size]
    scores[rows] = xp.where(where, scores[rows], -math.inf)


def _adjust(scores: Array, entries: Sequence[tuple[npt.NDArray[Any], ...]]) -> None:
    """Apply biases and penalties to scores, float64 [num_rows, vocab_size], in place.

    Args:
        scores: the scores.
        entries: per row, the changes to it, from `_entries`. Ids beyond the scores are skipped: a draft model may have
            fewer ids than its target.
    """
    xp, device = array_api_compat.array_namespace(scores), array_api_compat.device(scores)
    rows = np.repeat(np.arange(len(entries)), [len(token_ids) for token_ids, *_ in entries])
    token_ids, *columns = (np.concatenate(column) for column in zip(*entries, strict=True))
    if token_ids.max(initial=0) >= scores.shape[-1]:
        known = token_ids < scores.shape[-1]
        rows, token_ids, *columns = (each[known] for each in (rows, token_ids, *columns))
    place = tuple(xp.asarray(ids, dtype=xp.int64, device=device) for ids in (rows, token_ids))
    bias, repetition, frequency, presence = (xp.asarray(c, dtype=xp.float64, device=device) for c in columns)
    values = scores[place] + bias
    values = xp.where(values > 0.0, values / repetition.clip(min=MIN_DIVISOR), values * repetition)
    scores[place] = values - frequency - presence


def _entries(params: SamplingParams, before: TokensBefore) -> tuple[npt.NDArray[Any], ...]:
    """Return the changes by bias and penalties to one row of logits, as five arrays, each [number of changed ids].

    They are: id, bias, repetition penalty, frequency deduction, presence deduction.
    """
    seen = before if params.penalizes else NONE_BEFORE
    biased = [token_id for token_id, _ in params.logit_bias]
    if biased:
        seen = seen.with_ids(biased)
    bias = np.zeros(len(seen.token_ids))
    bias[np.searchsorted(seen.token_ids, biased)] = [value for _, value in params.logit_bias]
    in_output = seen.counts > 0
    repetition = np.where(in_output | seen.in_prompt, params.repetition_penalty, 1.0)
    presence = np.where(in_output, params.presence_penalty, 0.0)
    return seen.token_ids, bias, repetition, params.frequency_penalty * seen.counts, presence
