"""Masks of allowed tokens onto rows of scores. Knows no grammar: whoever has one makes the masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import array_api_compat
import numpy as np

from inference.model import Array


def mask_scores(scores: Array, masks: Sequence[bytes | None]) -> None:
    """Set what is not allowed to minus infinity, in place.

    Args:
        scores: float64 [num_rows, vocab_size].
        masks: per row, one bit per token id, lowest first; None allows all.
    """
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    xp = array_api_compat.array_namespace(scores)
    bits = np.stack([np.frombuffer(mask, dtype=np.uint8) for mask in masks if mask is not None])
    allowed = np.unpackbits(bits, axis=-1, bitorder="little")[:, : scores.shape[-1]].astype(bool)
    where = xp.asarray(allowed, device=array_api_compat.device(scores))  # [len(rows), vocab_size]
    scores[rows] = xp.where(where, scores[rows], -math.inf)
