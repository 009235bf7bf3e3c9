"""Log-probabilities of committed tokens, for requests that ask for them.

They are computed from the raw logits, as OpenAI and vLLM report them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from specdec.inference.commit import TokenLogprobs
from specdec.inference.model.slots import Array

LOWEST = -9999.0
"""Value in place of minus infinity, which JSON does not have; as in vLLM."""


MAX_ROWS = 64
"""Most rows that are computed at once: all rows of a long prompt would take hundreds of megabytes as float64."""


def token_logprobs(logits: Array, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Return for each row of logits the log-probabilities (log-softmax) of the chosen token, then of the best tokens.

    Args:
        logits: float [num_rows, vocab_size], unprocessed.
        token_ids: the token chosen from each row.
        num_top: number of best tokens per row.
    """
    parts = [slice(start, start + MAX_ROWS) for start in range(0, len(token_ids), MAX_ROWS)]
    return tuple(each for part in parts for each in _token_logprobs(logits[part], token_ids[part], num_top))


def _token_logprobs(logits: Array, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    rows = _to_numpy(logits).astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    np.maximum(rows, LOWEST, out=rows)
    named = [(row, [token_id, *_best(row, num_top)]) for row, token_id in zip(rows, token_ids, strict=True)]
    return tuple(TokenLogprobs(tuple(ids), tuple(row[ids].tolist())) for row, ids in named)


def _best(row: npt.NDArray[np.float64], num_top: int) -> list[int]:
    """Return the ids of the `num_top` largest entries, largest first; of equal ones, those with the lowest ids."""
    num_top = min(num_top, len(row))
    if not num_top:
        return []
    floor = np.partition(row, len(row) - num_top)[len(row) - num_top]
    candidates = np.flatnonzero(row >= floor)
    order = candidates[np.argsort(-row[candidates], kind="stable")][:num_top]
    return [int(token_id) for token_id in order]


def _to_numpy(array: Array) -> npt.NDArray[Any]:
    if array_api_compat.is_torch_array(array):
        array = array.float().cpu().numpy()  # numpy has no bfloat16
    return np.asarray(array)
