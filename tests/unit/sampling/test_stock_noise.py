"""Unmodified vLLM's noise (random numbers that choose tokens) is computed as documented, in numpy and torch alike."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from specdec.inference.request import MAX_SEED, Noise, SamplingParams
from specdec.inference.sampling.choice import choose_tokens, rank_tokens
from specdec.inference.sampling.noise import stock_keys, stock_noise
from tests.support import law
from tests.unit.sampling.test_choice import doc_rows, random_logits

MASK = 2**32 - 1
STEPS = [
    SamplingParams(0.8, noise=Noise.VLLM),
    SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.02, noise=Noise.VLLM),
    SamplingParams(0.0, noise=Noise.VLLM),
]


def murmur3(data: bytes) -> int:
    """Return the 32-bit Murmur3 hash, as published, of 4-byte words, with seed 0."""
    h = 0
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 & MASK
        h ^= ((k << 15 | k >> 17) & MASK) * 0x1B873593 & MASK
        h = ((h << 13 | h >> 19) & MASK) * 5 + 0xE6546B64 & MASK
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def noise(seed: int, position: int, token_id: int) -> np.float32:
    value: np.float32 = stock_noise(np.array(stock_keys([seed], [position])), np.array([token_id]))[0]
    return value


def test_the_reference_is_the_published_hash() -> None:
    assert murmur3(b"test") == 0xBA6BD213


def test_the_documented_vectors_hold() -> None:
    for row in doc_rows("stock seed"):
        seed, position, token_id = (int(row[title]) for title in ("stock seed", "position", "token id"))
        assert row["hash"] == f"{murmur3(struct.pack('<QII', seed, position - 1, token_id)):08x}"
        assert row["G"] == str(noise(seed, position, token_id))


def test_it_is_gumbels_of_the_hash() -> None:
    """Unmodified vLLM's noise is the Gumbel variate of the Murmur3 hash of (seed, position - 1, token id).

    The reference uses Python's integers and logarithm, so both are equal up to the rounding of float32.
    """
    rng = np.random.default_rng(3)
    for _ in range(300):
        seed, position, token_id = int(rng.integers(0, MAX_SEED, dtype=np.uint64)), *map(int, rng.integers(1, 2**31, 2))
        u = (murmur3(struct.pack("<QII", seed, position - 1, token_id)) + 0.5) / 2**32
        assert noise(seed, position, token_id) == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-5, abs=2e-6)


def test_numpy_and_torch_agree_to_the_bit() -> None:
    keys, token_ids = stock_keys([3, MAX_SEED, 0], [1, 2**31, 131071]), np.arange(50_000)
    by_numpy = stock_noise(np.array(keys)[:, None], token_ids)
    assert by_numpy.dtype == np.float32
    assert by_numpy.tobytes() == stock_noise(torch.tensor(keys)[:, None], torch.from_numpy(token_ids)).numpy().tobytes()


@pytest.mark.parametrize("choose", [choose_tokens, lambda *row: [best[0][0] for best in rank_tokens(*row, count=2)]])
def test_rows_of_both_laws_share_a_batch(choose: Callable[..., list[int]]) -> None:
    """Rows with this project's random numbers and rows with unmodified vLLM's can share a batch and keep their tokens.

    A draft worker may draft for targets of both kinds.
    """
    ours = [SamplingParams(0.8, seed=9), SamplingParams(0.8, top_k=20, seed=9), SamplingParams()]
    logits, sampling, at = random_logits(4, 6, 300), [*STEPS, *ours], [5, 6, 7, 8, 9, 10]
    alone = [choose_tokens(logits[i : i + 1], [p], [t])[0] for i, (p, t) in enumerate(zip(sampling, at, strict=True))]
    assert choose(logits, sampling, at) == choose(torch.from_numpy(logits), sampling, at) == alone


TOY = law.toy_logits(np.random.default_rng(11), 8)


@pytest.mark.parametrize("sampling", [STEPS[0], SamplingParams(1.2, top_k=5, top_p=0.9, noise=Noise.VLLM)])
def test_samples_follow_the_law(sampling: SamplingParams) -> None:
    table = law.choice_table(TOY, sampling, num_seeds=3000, num_positions=4)
    assert law.law_p_value(law.decode(table), TOY, sampling) > 1e-4


@pytest.mark.parametrize("key", [lambda seed, _: (seed, 1), lambda seed, position: (seed // 20, position + 1)])
def test_wrongly_keyed_noise_fails(key: law.NoiseKey) -> None:
    table = law.choice_table(TOY, STEPS[0], num_seeds=3000, num_positions=4, noise_key=key)
    assert law.law_p_value(law.decode(table), TOY, STEPS[0]) < 1e-6


def test_a_position_off_writes_another_text() -> None:
    at = law.choice_table(TOY, STEPS[0], num_seeds=50, num_positions=4, noise_key=lambda seed, t: (seed, t + 1))
    assert at != law.choice_table(TOY, STEPS[0], num_seeds=50, num_positions=4)
