"""Choice of one token from one row of logits: logits processing, Gumbel noise that draft and target share, the maximum.

The token at absolute position t is a pure function of the target's logits there, the sampling parameters, the
request's seed and t (Gumbel-max trick; shared-noise speculative sampling after Daliri, Musco, Suresh, "Coupling without
Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978):

    token = argmax over v of ( processed_logits[v] + G(seed, t, v) )      temperature 0: argmax of the logits

Here v runs over the token ids, and G is standard Gumbel noise (`noise.py`). Logits are processed as in Transformers,
and in its order: bias, penalties and grammar (specdec.inference.sampling.penalties),
temperature, top_k, top_p, min_p. The first three change the greedy choice too; the rest does not.

Everything here works alike on numpy arrays and torch tensors and gives the same bits on both; `noise.py` explains how.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import array_api_compat

from specdec.inference.commit import TokenAudit
from specdec.inference.model.slots import Array
from specdec.inference.request import Noise, SamplingParams
from specdec.inference.sampling.noise import LAWS, uniform_noise
from specdec.inference.sampling.penalties import (
    NONE_BEFORE,
    TokensBefore,
    adjust_logits,
    adjusts,
    hold_back,
    rows_within,
)
from specdec.inference.sampling.truncation import process_logits

# Noise by the libraries' logarithms differs from ours by less than 1e-9, and sums of scores and noise by rounding.
_ROUGH_MARGIN = 1e-8
ALL = 0
"""Value of `count` that asks for the scores of all tokens."""


def choose_tokens(
    logits: Array,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    before: Sequence[TokensBefore] | None = None,
) -> list[int]:
    """Choose one token from each row of logits.

    Args:
        logits: float [num_rows, vocab_size].
        sampling: sampling parameters, one per row.
        positions: per row, the position in the sequence of the token that is chosen from it.
        before: per row, the tokens before it and what may follow them; None if no row has penalties or a grammar.

    Returns:
        num_rows token ids. Ties go to the lowest id.
    """
    if _has_kernel(logits):
        return _choose_by_kernel(logits, sampling, positions, before)
    logits = _adjusted(logits, sampling, positions, before)
    return _argmax(_scored(logits, sampling, positions, count=1))


def _has_kernel(logits: Array) -> bool:
    """Return whether the Triton kernel can choose from `logits`.

    It can if Triton is installed, and they are torch tensors on a GPU, or Triton is interpreted, as in tests.
    """
    if not array_api_compat.is_torch_array(logits):
        return False
    return (logits.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and _finds_triton()


@cache
def _finds_triton() -> bool:
    return find_spec("triton") is not None


def _choose_by_kernel(
    logits: Array,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    before: Sequence[TokensBefore] | None,
) -> list[int]:
    """Choose as `choose_tokens` does, by the Triton kernel, which gets grammars as bit masks."""
    from specdec.inference.sampling.kernel import winners

    masks = [row.allowed for row in before or [NONE_BEFORE] * len(sampling)]
    before = before and rows_within(before, [None] * len(before))
    logits = _adjusted(logits, sampling, positions, before)
    return winners(logits, sampling, positions, masks)


def _adjusted(
    logits: Array,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    before: Sequence[TokensBefore] | None,
) -> Array:
    """Return the logits after bias, penalties, grammar and minimum length: a copy, or `logits` if none applies."""
    if not adjusts(sampling, before):
        return logits
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
        count: number of tokens per row.

    Returns:
        Per row, a list of (token id, score). The score is the logit, or with sampling the processed logit plus the
        Gumbel noise of the token; tokens that truncation removed have -inf.
    """
    logits = _adjusted(logits, sampling, positions, before)
    scores = _scored(logits, sampling, positions, count=count)
    return _best(logits + 0.0 if scores is logits else scores, count)  # the cheapest copy that both libraries make


def audit_tokens(
    logits: Array,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    before: Sequence[TokensBefore],
    token_ids: Sequence[int],
) -> tuple[TokenAudit, ...]:
    """Compare a given token for each row of logits with the token that is chosen from the row.

    Args:
        logits, sampling, positions, before: as for `choose_tokens`.
        token_ids: the given tokens, one per row.

    Returns:
        One record per row, in order.
    """
    xp = array_api_compat.array_namespace(logits)
    logits = _adjusted(logits, sampling, positions, before)
    scores, rows = _scored(logits, sampling, positions, count=ALL), list(range(len(token_ids)))
    own, choices = scores[rows, list(token_ids)], _argmax(scores)
    margins = (scores[rows, choices] - own).tolist()
    ranks = (xp.sum(xp.astype(scores > own[:, None], xp.int64), axis=-1) + 1).tolist()
    return tuple(map(TokenAudit, token_ids, choices, margins, ranks))


def _scored(logits: Array, sampling: Sequence[SamplingParams], positions: Sequence[int], *, count: int) -> Array:
    """Return the scores by which tokens are chosen: logits for greedy rows, else processed logits plus Gumbel noise.

    Args:
        logits, sampling, positions: as for `choose_tokens`.
        count: number of best tokens whose scores are needed, or `ALL`; in sampled rows, others may have -inf.

    Returns:
        float [num_rows, vocab_size]; `logits` itself if all rows are greedy.
    """
    groups = [[row for row, each in enumerate(sampling) if each.noise is law and not each.greedy] for law in Noise]
    if not any(groups):
        return logits
    if len(sampling) in map(len, groups):  # all rows have one law
        return _noisy(logits, sampling, positions, count=count)
    xp = array_api_compat.array_namespace(logits)
    scores = xp.asarray(logits, dtype=xp.float64, copy=True)
    for rows in filter(None, groups):
        each = logits[rows], [sampling[row] for row in rows], [positions[row] for row in rows]
        scores[rows] = xp.astype(_noisy(*each, count=count), xp.float64)
    return scores


def _best(scores: Array, count: int) -> list[list[tuple[int, float]]]:
    """Return (token id, score) of the `count` best tokens of each row, best first; set them to -inf in `scores`.

    Args:
        scores: float [num_rows, vocab_size]; changed in place.
        count: number of tokens per row.
    """
    if scores.shape[0] == 1:  # a single element takes 10 % of the time of a list of them
        return [[_take_best(scores[0]) for _ in range(count)]]
    rows, places = list(range(scores.shape[0])), []
    for _ in range(count):
        token_ids = _argmax(scores)
        places.append(zip(token_ids, scores[rows, token_ids].tolist(), strict=True))
        scores[rows, token_ids] = -math.inf
    return [list(best) for best in zip(*places, strict=True)]


def _take_best(scores: Array) -> tuple[int, float]:
    """Return the best token of one row and its score; set this score to -inf in `scores`, float [vocab_size]."""
    token_id = int(scores.argmax())
    score = float(scores[token_id])
    scores[token_id] = -math.inf
    return token_id, score


def _noisy(logits: Array, sampling: Sequence[SamplingParams], positions: Sequence[int], *, count: int) -> Array:
    """Return processed logits plus Gumbel noise, float [num_rows, vocab_size].

    Tokens that are surely not among the best `count` of their row may have -inf. No row may be greedy, and all must
    have the same rule for random numbers (docs/noise.md).
    """
    xp = array_api_compat.array_namespace(logits)
    keys_of, noise_of = LAWS[sampling[0].noise]
    keys = keys_of([p.seed for p in sampling], positions)
    keys = xp.asarray(keys, dtype=xp.int64, device=array_api_compat.device(logits))
    scores = process_logits(logits, sampling)
    rows, token_ids = xp.nonzero(_contenders(scores, sampling, keys, count))
    noisy = xp.full_like(scores, -math.inf)
    noisy[rows, token_ids] = scores[rows, token_ids] + noise_of(keys[rows], token_ids)
    return noisy


def _contenders(scores: Array, sampling: Sequence[SamplingParams], keys: Array, count: int) -> Array:
    """Return which tokens may be among the best `count` once Gumbel noise is added; exact noise for all is slow.

    They are all tokens that truncation left if `count` is `ALL`, if all rows are truncated, or if the random numbers
    are those of stock vLLM. Otherwise they are selected by noise computed with the library's own logarithm, which is
    fast, and whose error is far less than the margin that is allowed for it.

    Args:
        scores: processed logits, float [num_rows, vocab_size].
        sampling: one per row.
        keys: int64 [num_rows], hashes of seed and position, which give the noise of the row's tokens.
        count: number of best tokens, or `ALL`.

    Returns:
        bool [num_rows, vocab_size].
    """
    if count == ALL or sampling[0].noise is Noise.VLLM or all(params.truncates for params in sampling):
        return scores > -math.inf
    xp = array_api_compat.array_namespace(scores)
    token_ids = xp.arange(scores.shape[-1], dtype=xp.int64, device=array_api_compat.device(scores))
    rough = scores - xp.log(-xp.log(uniform_noise(keys[:, None], token_ids[None, :])))
    floor = xp.max(rough, axis=-1, keepdims=True)
    for _ in range(count - 1):  # the largest below those seen; a tie lets in more, which does no harm
        floor = xp.max(xp.where(rough < floor, rough, -math.inf), axis=-1, keepdims=True)
    return rough >= floor - _ROUGH_MARGIN * (1.0 + xp.abs(floor))
