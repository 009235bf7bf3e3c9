"""The choice of `choose_tokens` on a GPU, by one Triton kernel: mask, temperature, truncation, noise and maximum.

Rows of logits stay on the device and are read once; one id per row comes back. The arithmetic is that of `noise.py`,
operation by operation in double precision, so the tokens are those that numpy gives. For that, Triton must not fuse a
product and a sum.

Callers apply biases and penalties to the logits first. This module imports Triton, so `choice.py` imports it only where
rows are on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from specdec.inference.request import Noise, SamplingParams
from specdec.inference.sampling import noise as law
from specdec.inference.sampling.penalties import mask_scores
from specdec.inference.sampling.truncation import divisor, scale_logits, truncation_floor

_GREEDY, _SPECDEC, _STOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_KINDS = {Noise.SPECDEC: 1, Noise.VLLM: 2}
BLOCK = 1024
"""Number of token ids that one program of the kernel compares."""
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(law.signed(x)) for x in (law.GOLDEN, law.MIX_1, law.MIX_2))
_SQRT_HALF, _LN_2 = tl.constexpr(law.SQRT_HALF), tl.constexpr(law.LN_2)
_SERIES_BELOW, _LEAST = tl.constexpr(law.STOCK_SERIES_BELOW), tl.constexpr(law.STOCK_LEAST)


@triton.jit
def _log(x: tl.tensor) -> tl.tensor:
    """Return the logarithm as `noise._log` does; x must be a positive normal number, so its bits can be taken apart."""
    bits = x.to(tl.int64, bitcast=True)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)  # in [1/2, 1)
    is_small = (mantissa < _SQRT_HALF).to(tl.float64)
    mantissa = mantissa * (is_small + 1.0)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = z * (1.0 / 13.0)
    for i in tl.static_range(5):
        series = (series + 1.0 / (11.0 - 2.0 * i)) * z
    return (series + 1.0) * s * 2.0 + (((bits >> 52) - 1022).to(tl.float64) - is_small) * _LN_2


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """Return the bits of 64-bit integers mixed by the finalizer of SplitMix64, as `noise._mix` does on arrays."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _noise(key: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Return the Gumbel noise of tokens, float64, as `noise.gumbel_noise` does on arrays."""
    high_bits = (_mix(key + (token_ids + 1) * _GOLDEN) >> 12) & 0xFFFFFFFFFFFFF
    return -_log(-_log((high_bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))


@triton.jit
def _rotate(word: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    return ((word << bits) | (word >> (32 - bits))) & 0xFFFFFFFF


@triton.jit
def _stock_noise(key: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Return the Gumbel noise of tokens by stock vLLM's rule: the float32 values of `noise.stock_noise`, as float64."""
    word = _rotate(token_ids * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
    h = ((_rotate(key ^ word, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    u = (h >> 16).to(tl.float32) * 1.52587890625e-05 + ((h & 0xFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * 0.125
    for i in tl.static_range(6):
        series = u * (series + 1.0 / (7.0 - i))
    direct = _log(tl.maximum(1.0 - u, _LEAST).to(tl.float64)).to(tl.float32)
    log = tl.where(u < _SERIES_BELOW, -u * (series + 1.0), direct)
    return -_log(-log.to(tl.float64)).to(tl.float32).to(tl.float64)


@triton.jit
def _best_of_block(
    logits: tl.tensor,  # float [num_rows, vocab_size]
    stride: tl.tensor,
    table: tl.tensor,  # int64 [num_rows, 4]: kind, key, divisor as the bits of a float64, place of the mask or -1
    floors: tl.tensor,  # float64 [num_rows]
    masks: tl.tensor,  # uint8 [num_masks, width]
    width: tl.tensor,
    best: tl.tensor,  # float64 [num_rows, num_blocks], written
    best_ids: tl.tensor,  # int64 [num_rows, num_blocks], written
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find the best token of one block of a row, and its score with Gumbel noise; write them to `best_ids` and `best`.

    A block has the `BLOCK` neighbouring token ids that one program of the kernel compares.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_ids = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_there = token_ids < vocab_size
    scores = tl.load(logits + row * stride + token_ids, mask=is_there, other=float("-inf")).to(tl.float64)
    kind, key = tl.load(table + row * 4), tl.load(table + row * 4 + 1)
    place = tl.load(table + row * 4 + 3)
    if place >= 0:
        byte = tl.load(masks + place * width + token_ids // 8, mask=token_ids // 8 < width, other=0)
        scores = tl.where(((byte >> (token_ids % 8).to(tl.uint8)) & 1) != 0, scores, float("-inf"))
    if kind != _GREEDY:
        scale, floor = tl.load(table + row * 4 + 2).to(tl.float64, bitcast=True), tl.load(floors + row)
        if kind == _STOCK:
            scores = (scores.to(tl.float32).to(tl.float64) / scale).to(tl.float32).to(tl.float64)
            scores = tl.where(scores < floor, float("-inf"), scores) + _stock_noise(key, token_ids)
            scores = scores.to(tl.float32).to(tl.float64)
        else:
            scores = scores / scale
            scores = tl.where(scores < floor, float("-inf"), scores) + _noise(key, token_ids)
    score, index = tl.max(scores, axis=0, return_indices=True)
    place = row * tl.num_programs(1) + block
    tl.store(best + place, score)
    tl.store(best_ids + place, block * BLOCK + index)


def winners(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int], masks: Sequence[bytes | None]
) -> list[int]:
    """Return the id of the best token of each row; for the arguments see `best_of_blocks`."""
    best, best_ids = best_of_blocks(logits, sampling, positions, masks)
    chosen: list[int] = best_ids.gather(1, best.argmax(dim=1, keepdim=True))[:, 0].tolist()
    return chosen


def best_of_blocks(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int], masks: Sequence[bytes | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the best token in each block of `BLOCK` neighbouring token ids of each row.

    Args:
        logits: float [num_rows, vocab_size], on a device; biases and penalties are applied already.
        sampling, positions: as for `choose_tokens`.
        masks: per row, which tokens are allowed, one bit per token id; None allows all. See `mask_scores`.

    Returns:
        The best scores, noise included, float64 [num_rows, num_blocks]; and their token ids, int64 of the same shape.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    best = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=logits.device)
    best_ids = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=logits.device)
    given = [np.frombuffer(mask, dtype=np.uint8) for mask in masks if mask is not None]
    bits = torch.from_numpy(np.stack(given) if given else np.zeros((1, 1), np.uint8)).to(logits.device)
    _best_of_block[num_rows, num_blocks](
        logits,
        logits.stride(0),
        torch.from_numpy(_table(sampling, positions, masks)).to(logits.device),
        _floors(logits, sampling, masks),
        bits,
        bits.shape[1],
        best,
        best_ids,
        vocab_size,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    return best, best_ids


def _table(sampling: Sequence[SamplingParams], positions: Sequence[int], masks: Sequence[bytes | None]) -> Any:
    """Return the parameters of the kernel for each row as one array, so that one copy brings them to the device.

    Returns:
        int64 [num_rows, 4]; for the columns see `table` of `_best_of_block`.
    """
    kinds = [0 if params.greedy else _KINDS[params.noise] for params in sampling]
    keys = [law.LAWS[p.noise][0]([p.seed], [at])[0] for p, at in zip(sampling, positions, strict=True)]
    divisors = np.array([np.float32(divisor(p)) if p.noise is Noise.VLLM else divisor(p) for p in sampling])
    has_mask = np.array([mask is not None for mask in masks])
    places = np.where(has_mask, np.cumsum(has_mask) - 1, -1)
    return np.stack([kinds, keys, divisors.astype(np.float64).view(np.int64), places], axis=1)


def _floors(logits: torch.Tensor, sampling: Sequence[SamplingParams], masks: Sequence[bytes | None]) -> torch.Tensor:
    """Return the smallest score of each row that survives truncation, float64 [num_rows]; -inf without truncation."""
    floors = torch.full((len(sampling),), float("-inf"), dtype=torch.float64, device=logits.device)
    for noise in Noise:
        rows = [row for row, p in enumerate(sampling) if p.truncates and not p.greedy and p.noise is noise]
        if rows:
            params, scores = [sampling[row] for row in rows], logits[rows]
            mask_scores(scores, [masks[row] for row in rows])
            floors[rows] = truncation_floor(scale_logits(scores, params), params)[:, 0].double()
    return floors
