"""Bias, penalties, grammar: what changes single logits before a token is chosen, by request and by the tokens so far.

Owns the arithmetic and the counting of tokens; knows neither noise nor truncation. In this order, which is vLLM's, and
Transformers' as far as it has them:

    logit_bias            logit + bias
    repetition_penalty    tokens in prompt or output: logit / penalty if it is above 0, else logit * penalty
    frequency_penalty     logit - penalty * occurrences in the output
    presence_penalty      logit - penalty, if the token is in the output
    held_back             minus infinity, below the position where the sequence may end
    grammar               minus infinity, if the token may not follow (inference.sampling.masks)

Only the tokens concerned are touched, in double, by single IEEE operations: numpy and torch give the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from inference.model import Array
from inference.request import HoldingParams, SamplingParams
from inference.sampling.masks import mask_scores

_Column = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class TokensBefore:
    """What the tokens before a row mean for its choice.

    Attributes:
        prompt: the ids in the prompt.
        output: how often each id is in the output, draft tokens before the row included.
        allowed: the mask of the ids that the grammar allows, as `Matcher.masks` gives it; None: all.
    """

    prompt: frozenset[int]
    output: Counter[int]
    allowed: bytes | None = None

    @classmethod
    def of(cls, token_ids: Sequence[int], output_start: int) -> TokensBefore:
        """Count a sequence whose first output token has position `output_start`."""
        return cls(frozenset(token_ids[:output_start]), Counter(token_ids[output_start:]))

    def followed_by(self, token_id: int) -> TokensBefore:
        """The same with one more output token."""
        output = self.output.copy()
        output[token_id] += 1
        return TokensBefore(self.prompt, output)


NONE_BEFORE = TokensBefore(frozenset(), Counter())


def rows_before(
    token_ids: Sequence[int], proposal: Sequence[int], *, output_start: int, sampling: SamplingParams
) -> list[TokensBefore]:
    """What stands before each of the len(proposal) + 1 rows that verify a proposal behind `token_ids`."""
    if not sampling.penalizes:
        return [NONE_BEFORE] * (len(proposal) + 1)
    rows = [TokensBefore.of(token_ids, output_start)]
    for token_id in proposal:
        rows.append(rows[-1].followed_by(token_id))
    return rows


def rows_within(rows: Sequence[TokensBefore], masks: Sequence[bytes | None]) -> list[TokensBefore]:
    """The rows, each with what a grammar allows there; masks may end before rows do."""
    return [replace(row, allowed=mask) for row, mask in itertools.zip_longest(rows, masks)]


def adjusts(sampling: Sequence[SamplingParams], before: Sequence[TokensBefore] | None) -> bool:
    """Whether any row needs `adjust_logits`; if not, it would only copy."""
    return any(params.penalizes or params.logit_bias or isinstance(params, HoldingParams) for params in sampling) or (
        before is not None and any(row.allowed is not None for row in before)
    )


def hold_back(scores: Array, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> Array:
    """Take away the chances of tokens that must not come yet, in place.

    Args:
        scores: float [num_rows, vocab_size].
        sampling, positions: one per row.
    """
    vocab_size = scores.shape[-1]
    for row, (params, position) in enumerate(zip(sampling, positions, strict=True)):
        if isinstance(params, HoldingParams) and position < params.until:
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
    found = [_entries(params, seen) for params, seen in zip(sampling, before, strict=True)]
    rows = np.repeat(np.arange(len(found)), [len(entries.token_ids) for entries in found])
    if len(rows):
        _adjust(scores, rows, [np.concatenate(columns) for columns in zip(*found, strict=True)])
    mask_scores(scores, [row.allowed for row in before])
    return scores


class _Entries(NamedTuple):
    """The tokens of a row whose logits change, each once: columns of one length."""

    token_ids: _Column
    bias: _Column
    repetition: _Column
    frequency: _Column
    presence: _Column


def _adjust(scores: Array, rows: _Column, columns: Sequence[_Column]) -> None:
    """Change entries (a row of each, then columns as in `_Entries`) of float64 [num_rows, vocab_size], in place."""
    xp, device = array_api_compat.array_namespace(scores), array_api_compat.device(scores)
    token_ids, *numbers = columns
    place = tuple(xp.asarray(ids, dtype=xp.int64, device=device) for ids in (rows, token_ids))
    bias, repetition, frequency, presence = (xp.asarray(c, dtype=xp.float64, device=device) for c in numbers)
    values = scores[place] + bias
    values = xp.where(values > 0.0, values / repetition, values * repetition)
    scores[place] = values - frequency - presence


def _entries(params: SamplingParams, before: TokensBefore) -> _Entries:
    """Bias, repetition factor, frequency and presence deductions of every token concerned.

    Without a loop in Python: a long context has thousands, and everybody's pass waits for them.
    """
    biases = dict(params.logit_bias)
    output = before.output if params.penalizes else Counter[int]()
    prompt = before.prompt if params.repetition_penalty != 1.0 else frozenset[int]()
    token_ids = list(biases.keys() | output.keys() | prompt)
    counts = _column(map(output.get, token_ids, itertools.repeat(0)), token_ids)
    is_out = counts > 0
    is_in = is_out | _column(map(prompt.__contains__, token_ids), token_ids).astype(bool)
    return _Entries(
        np.asarray(token_ids, np.int64),
        _column(map(biases.get, token_ids, itertools.repeat(0.0)), token_ids),
        np.where(is_in, params.repetition_penalty, 1.0),
        params.frequency_penalty * counts,
        np.where(is_out, params.presence_penalty, 0.0),
    )


def _column(values: Iterable[float | None], token_ids: Sequence[int]) -> _Column:
    return np.fromiter(values, np.float64, len(token_ids))
