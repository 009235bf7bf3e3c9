"""Tests that the Triton kernel for sampling chooses numpy's tokens; Triton's interpreter runs it (`make test-vllm`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="make test-vllm has an environment with it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("make test-vllm runs these with TRITON_INTERPRET=1", allow_module_level=True)
import torch

from specdec.inference.request import MAX_SEED, MinLengthSampling, Noise, SamplingParams
from specdec.inference.sampling import kernel
from specdec.inference.sampling.choice import choose_tokens
from specdec.inference.sampling.noise import LAWS
from specdec.inference.sampling.penalties import NONE_BEFORE, TokensBefore

NUM_ROWS = 6
VOCAB_SIZE = 2085
"""Vocabulary size for which the kernel runs in three blocks; the last has 37 ids, not a multiple of 8 (a mask byte)."""


def drawn(rng: np.random.Generator, noise: Noise) -> SamplingParams:
    """Return random sampling parameters: each kind of truncation may be absent, and a third of them are greedy."""
    return MinLengthSampling(
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        top_k=int(rng.choice([0, 20])),
        top_p=float(rng.choice([1.0, 0.9])),
        min_p=float(rng.choice([0.0, 0.05])),
        seed=int(rng.integers(0, MAX_SEED, dtype=np.uint64)),
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        logit_bias=((7, 3.5), (VOCAB_SIZE - 1, 2.0)) if rng.random() < 0.3 else (),
        held_back=(3, 5) if rng.random() < 0.3 else (),
        until=10**6,
        noise=noise,
    )


def before(rng: np.random.Generator, mask: bool) -> TokensBefore:
    """Return random tokens before a position; with `mask`, also a grammar's mask that allows one token in eight."""
    seen = TokensBefore.of([int(token_id) for token_id in rng.integers(0, VOCAB_SIZE, 30)], 12)
    allowed = rng.integers(0, 256, (3, (VOCAB_SIZE + 7) // 8), dtype=np.uint8)
    return replace(seen, allowed=np.bitwise_and.reduce(allowed).tobytes() if mask else None)


def both(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], at: Sequence[int], seen: Sequence[TokensBefore] | None
) -> tuple[list[int], list[int]]:
    """Return, for each row of logits, the token id that the Triton kernel chooses, and the one that numpy chooses."""
    return choose_tokens(logits, sampling, at, seen), choose_tokens(logits.float().numpy(), sampling, at, seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(2))
def test_winners_are_those_of_numpy(seed: int, dtype: torch.dtype) -> None:
    """The kernel chooses numpy's tokens, for greedy and sampled rows, with penalties and grammars.

    Rows use either way of drawing random numbers, this project's or vLLM's.
    """
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(scale=2.0, size=(NUM_ROWS, VOCAB_SIZE))).to(dtype)
    sampling = [drawn(rng, Noise(noise)) for noise in rng.choice([*Noise], NUM_ROWS)]
    at = [int(position) for position in rng.integers(1, 10**5, NUM_ROWS)]
    assert_same(logits, sampling, at, [before(rng, mask=row % 3 == 0) for row in range(NUM_ROWS)])
    assert_same(logits, [SamplingParams(1.0, seed=p.seed, noise=p.noise) for p in sampling], at, None)


def assert_same(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], at: Sequence[int], seen: Sequence[TokensBefore] | None
) -> None:
    by_kernel, by_numpy = both(logits, sampling, at, seen)
    assert by_kernel == by_numpy


@pytest.mark.parametrize("noise", Noise)
def test_the_noise_has_the_same_bits(noise: Noise) -> None:
    """The kernel's Gumbel numbers have the same bits as numpy's.

    With equal logits, a row's best score is its largest random number, so that a wrong bit shows in it.
    """
    rng = np.random.default_rng(5)
    seeds, at = [int(seed) for seed in rng.integers(0, MAX_SEED, 20, dtype=np.uint64)], [*range(1, 21)]
    keys_of, noise_of = LAWS[noise]
    expected = noise_of(np.array(keys_of(seeds, at))[:, None], np.arange(kernel.BLOCK)[None, :])
    sampling = [SamplingParams(1.0, seed=seed, noise=noise) for seed in seeds]
    scores, _ = kernel.best_of_blocks(torch.zeros((20, kernel.BLOCK)), sampling, at, [None] * 20)
    assert scores[:, 0].tolist() == expected.max(axis=-1).tolist()


def test_ties_and_rows_without_a_token_go_to_the_lowest_id() -> None:
    logits = torch.zeros((3, VOCAB_SIZE))
    logits[0, [40, 1500]] = 1.0
    logits[1:] = -torch.inf
    sampling = [SamplingParams(), SamplingParams(), SamplingParams(1.0, seed=3)]
    assert choose_tokens(logits, sampling, [1, 2, 3], [NONE_BEFORE] * 3) == [40, 0, 0]


@pytest.mark.parametrize("noise", Noise)
@pytest.mark.parametrize("wrong", ["position", "seed", "law"])
def test_a_wrong_key_is_noticed(noise: Noise, wrong: str) -> None:
    """With equal logits, random numbers of a wrong position, seed or kind change the token of every row."""
    logits = torch.zeros((NUM_ROWS, VOCAB_SIZE))
    other = next(each for each in Noise if each is not noise)
    right = [SamplingParams(1.0, seed=seed, noise=noise) for seed in range(NUM_ROWS)]
    changes: dict[str, dict[str, Any]] = {"seed": {"seed": 77}, "law": {"noise": other}, "position": {}}
    at = [8 + (wrong == "position")] * NUM_ROWS
    by_kernel = choose_tokens(logits, [replace(params, **changes[wrong]) for params in right], at)
    by_numpy = choose_tokens(logits.numpy(), right, [8] * NUM_ROWS)
    assert not set(zip(range(NUM_ROWS), by_kernel, strict=True)) & set(zip(range(NUM_ROWS), by_numpy, strict=True))
