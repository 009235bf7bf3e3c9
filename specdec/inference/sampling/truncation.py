"""Temperature and truncation (top_k, top_p, min_p) of rows of logits; the same bits on numpy and torch.

The precision is that of the rule for random numbers (docs/noise.md): float64, or by the rule of stock vLLM float32.
The latter also applies min_p before top_k and top_p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import array_api_compat

from specdec.inference.model.slots import Array
from specdec.inference.request import Noise, SamplingParams
from specdec.inference.sampling.penalties import MIN_DIVISOR

STOCK_MIN_TEMPERATURE = 0.01
"""Least temperature in stock vLLM, which raises smaller ones."""


def process_logits(logits: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Scale and truncate rows of logits; no row may be greedy, and all must have the same rule for random numbers.

    Args:
        logits: float [num_rows, vocab_size].
        sampling: one per row.

    Returns:
        float64, or float32 by stock vLLM's rule, [num_rows, vocab_size]; removed tokens are -inf. Tokens that tie with
        the last one kept are kept.
    """
    scores = scale_logits(logits, sampling)
    return _keep_above(scores, truncation_floor(scores, sampling)) if any(p.truncates for p in sampling) else scores


def scale_logits(logits: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Divide rows of logits by their temperatures, in float64, or in float32 by stock vLLM's rule for random numbers.

    For the arguments see `process_logits`.
    """
    xp = array_api_compat.array_namespace(logits)
    scores = xp.astype(logits, xp.float32 if sampling[0].noise is Noise.VLLM else xp.float64)
    return scores / _column(scores, [divisor(p) for p in sampling])


def divisor(params: SamplingParams) -> float:
    """Return the divisor of a row's logits: its temperature, or a small positive number if that is larger.

    The number is STOCK_MIN_TEMPERATURE for a request whose tokens are those of stock vLLM, else MIN_DIVISOR. It keeps
    the division defined at temperature 0, where the largest logit is chosen.
    """
    return max(params.temperature, STOCK_MIN_TEMPERATURE if params.noise is Noise.VLLM else MIN_DIVISOR)


def _keep_above(scores: Array, floor: Array) -> Array:
    xp = array_api_compat.array_namespace(scores)
    return xp.where(scores < floor, -math.inf, scores)


def truncation_floor(scores: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Return the smallest score of each row that survives top_k, top_p and min_p: float [num_rows, 1].

    Args:
        scores: logits divided by temperature, float [num_rows, vocab_size].
        sampling: one per row.
    """
    xp = array_api_compat.array_namespace(scores)
    floor = xp.max(scores, axis=-1, keepdims=True)
    floor = floor + _column(scores, [math.log(p.min_p) if p.min_p else -math.inf for p in sampling])
    if not any(p.top_k or p.top_p < 1.0 for p in sampling):
        return floor
    kept = _keep_above(scores, floor) if sampling[0].noise is Noise.VLLM else scores
    return xp.maximum(floor, _top_k_top_p_floor(kept, sampling))


def _top_k_top_p_floor(scores: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Return the smallest score of each row that survives top_k and then top_p: float [num_rows, 1]."""
    xp = array_api_compat.array_namespace(scores)
    num_rows, vocab_size = scores.shape
    ascending = xp.sort(scores, axis=-1, stable=False)  # half the time of a stable one
    kth = [vocab_size - min(p.top_k or vocab_size, vocab_size) for p in sampling]
    top_k_floor = ascending[list(range(num_rows)), kth][:, None]
    ascending = _keep_above(ascending, top_k_floor)
    weights = xp.exp(ascending - ascending[:, -1:])
    cumulative = xp.cumulative_sum(weights, axis=-1)
    cut = [1.0 - p.top_p if p.top_p < 1.0 else -1.0 for p in sampling]  # not 0: a share may be rounded to it
    tail = cumulative / cumulative[:, -1:] <= _column(scores, cut)
    top_p_floor = xp.min(xp.where(tail, math.inf, ascending), axis=-1, keepdims=True)
    top_p_floor = xp.minimum(top_p_floor, ascending[:, -1:])  # the best token always stays
    return xp.maximum(top_k_floor, top_p_floor)


def _column(like: Array, values: Sequence[float]) -> Array:
    """Return `values` as an array [len(values), 1], of the dtype and on the device of `like`."""
    xp = array_api_compat.array_namespace(like)
    return xp.asarray(values, dtype=like.dtype, device=array_api_compat.device(like))[:, None]
