"""Choice of one token from one row of logits: logits processing, the shared noise, and the maximum.

The token at absolute position t is a pure function of the target's logits there, the sampling parameters, the
request's seed and t (Gumbel-max trick; shared-noise speculative sampling after Daliri, Musco, Suresh, "Coupling without
Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978):

    token = argmax over v of ( processed_logits[v] + G(seed, t, v) )      temperature 0: argmax of the logits

Processing is Transformers' and in its order: bias, penalties and grammar (specdec.inference.sampling.penalties),
temperature, top_k, top_p, min_p. The first three change the greedy choice too; the rest does not.

Everything here works alike on numpy arrays and torch tensors and gives the same bits on both; `noise.py` explains how.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import array_api_compat

from specdec.inference.model.slots import Array
from specdec.inference.request import SamplingParams
from specdec.inference.sampling.noise import gumbel_noise, noise_keys, uniform_noise
from specdec.inference.sampling.penalties import (
    MIN_DIVISOR,
    NONE_BEFORE,
    TokensBefore,
    adjust_logits,
    adjusts,
    hold_back,
)

# Noise by the libraries' logarithms differs from ours by less than 1e-9, and sums of scores and noise by rounding.
_ROUGH_MARGIN = 1e-8


def process_logits(logits: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Scale and truncate rows of logits; no row may be greedy.

    Args:
        logits: float [num_rows, vocab_size].
        sampling: one per row.

    Returns:
        float64 [num_rows, vocab_size]; removed tokens are -inf. Tokens that tie with the last one kept are kept.
    """
    xp = array_api_compat.array_namespace(logits)
    scores = xp.astype(logits, xp.float64) / _column(logits, [max(p.temperature, MIN_DIVISOR) for p in sampling])
    if any(p.top_k or p.top_p < 1.0 for p in sampling):
        scores = _keep_above(scores, _top_k_top_p_floor(scores, sampling))
    if any(p.min_p for p in sampling):
        log_min_p = [math.log(p.min_p) if p.min_p else -math.inf for p in sampling]
        scores = _keep_above(scores, xp.max(scores, axis=-1, keepdims=True) + _column(logits, log_min_p))
    return scores


def _keep_above(scores: Array, floor: Array) -> Array:
    xp = array_api_compat.array_namespace(scores)
    return xp.where(scores < floor, -math.inf, scores)


def _top_k_top_p_floor(scores: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Return the smallest score that survives top_k and then top_p: float64 [num_rows, 1]."""
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
    """Return float64 [len(values), 1], on the device of `like`."""
    xp = array_api_compat.array_namespace(like)
    return xp.asarray(values, dtype=xp.float64, device=array_api_compat.device(like))[:, None]


def choose_tokens(
    logits: Array,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    before: Sequence[TokensBefore] | None = None,
) -> list[int]:
    """Choose one token per row.

    Args:
        logits: float [num_rows, vocab_size].
        sampling: one per row.
        positions: absolute position of the token that each row chooses.
        before: the tokens before each row, and what may follow them; needed if any row penalizes or has a grammar.

    Returns:
        num_rows token ids. Ties go to the lowest id.
    """
    if adjusts(sampling, before):
        logits = _adjusted(logits, sampling, positions, before)
    sampled = [row for row, params in enumerate(sampling) if not params.greedy]
    if not sampled:
        return _argmax(logits)
    if len(sampled) == len(sampling):
        return _sample(logits, sampling, positions)
    chosen = _argmax(logits)
    for row, token_id in zip(
        sampled,
        _sample(logits[sampled], [sampling[row] for row in sampled], [positions[row] for row in sampled]),
        strict=True,
    ):
        chosen[row] = token_id
    return chosen


def _adjusted(
    logits: Array,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    before: Sequence[TokensBefore] | None,
) -> Array:
    if before is None:
        if any(params.penalizes for params in sampling):
            raise ValueError("penalties look back: choose_tokens needs the tokens before each row")
        before = [NONE_BEFORE] * len(sampling)
    return hold_back(adjust_logits(logits, sampling, before), sampling, positions)


def _argmax(scores: Array) -> list[int]:
    chosen: list[int] = scores.argmax(-1).tolist()  # a method of both libraries, in a fifth of the function's time
    return chosen


def rank_tokens(
    logits: Array,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    before: Sequence[TokensBefore] | None = None,
    *,
    count: int,
) -> list[list[tuple[int, float]]]:
    """Return the best tokens of each row with their scores, best first; the first is what `choose_tokens` chooses.

    Args:
        logits, sampling, positions, before: as for `choose_tokens`.
        count: tokens per row; tokens that truncation removed have the score -inf.

    Returns:
        Per row, (token id, score); the score is the logit, or with sampling the processed logit plus noise.
    """
    if adjusts(sampling, before):
        logits = _adjusted(logits, sampling, positions, before)
    sampled = [row for row, params in enumerate(sampling) if not params.greedy]
    if not sampled:
        return _best(logits + 0.0, count)  # the cheapest copy that both libraries make
    if len(sampled) == len(sampling):
        return _best(_noisy(logits, sampling, positions, count=count), count)
    xp = array_api_compat.array_namespace(logits)
    scores = xp.asarray(logits, dtype=xp.float64, copy=True)
    rows = [sampling[row] for row in sampled], [positions[row] for row in sampled]
    scores[sampled] = _noisy(logits[sampled], *rows, count=count)
    return _best(scores, count)


def _best(scores: Array, count: int) -> list[list[tuple[int, float]]]:
    """Return the `count` largest scores of each row, descending; they are set to -inf in `scores`."""
    if scores.shape[0] == 1:  # a single element takes 10 % of the time of a list of them
        return [[_take_best(scores[0]) for _ in range(count)]]
    rows, places = list(range(scores.shape[0])), []
    for _ in range(count):
        token_ids = _argmax(scores)
        places.append(zip(token_ids, scores[rows, token_ids].tolist(), strict=True))
        scores[rows, token_ids] = -math.inf
    return [list(best) for best in zip(*places, strict=True)]


def _take_best(scores: Array) -> tuple[int, float]:
    """Return the largest score of one row and its token, and set it to -inf."""
    token_id = int(scores.argmax())
    score = float(scores[token_id])
    scores[token_id] = -math.inf
    return token_id, score


def _sample(logits: Array, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    return _argmax(_noisy(logits, sampling, positions, count=1))


def _noisy(logits: Array, sampling: Sequence[SamplingParams], positions: Sequence[int], *, count: int) -> Array:
    """Return the scores with noise of the tokens that may be among the best `count`; -inf for others."""
    xp = array_api_compat.array_namespace(logits)
    device = array_api_compat.device(logits)
    keys = xp.asarray(noise_keys([p.seed for p in sampling], positions), dtype=xp.int64, device=device)
    scores = process_logits(logits, sampling)
    rows, token_ids = xp.nonzero(_contenders(scores, sampling, keys, count))
    noisy = xp.full_like(scores, -math.inf)
    noisy[rows, token_ids] = scores[rows, token_ids] + gumbel_noise(keys[rows], token_ids)
    return noisy


def _contenders(scores: Array, sampling: Sequence[SamplingParams], keys: Array, count: int) -> Array:
    """Return a mask of the tokens that may be among the best `count` with noise; exact noise for all is slow.

    Truncation leaves few; otherwise the library's own logarithm finds them, which is fast and off by far less than
    the margin.
    """
    if all(params.truncates for params in sampling):
        return scores > -math.inf
    xp = array_api_compat.array_namespace(scores)
    token_ids = xp.arange(scores.shape[-1], dtype=xp.int64, device=array_api_compat.device(scores))
    rough = scores - xp.log(-xp.log(uniform_noise(keys[:, None], token_ids[None, :])))
    floor = xp.max(rough, axis=-1, keepdims=True)
    for _ in range(count - 1):  # the largest below those seen; a tie lets in more, which does no harm
        floor = xp.max(xp.where(rough < floor, rough, -math.inf), axis=-1, keepdims=True)
    return rough >= floor - _ROUGH_MARGIN * (1.0 + xp.abs(floor))
