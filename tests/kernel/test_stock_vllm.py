"""Tests that `--noise vllm` gives the tokens that vLLM's own kernels choose; Triton's interpreter runs these."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton", reason="make test-vllm has an environment with it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("make test-vllm runs these with TRITON_INTERPRET=1", allow_module_level=True)
import torch

from specdec.inference.request import MAX_SEED, Noise, SamplingParams
from specdec.inference.sampling.choice import choose_tokens

NUM_ROWS, VOCAB_SIZE = 8, 1500


def stock(logits: torch.Tensor, sampling: list[SamplingParams], at: list[int]) -> list[int]:
    """Return the token that vLLM's own functions choose for each row of logits, at the row's position in `at`."""
    from triton.backends import backends

    # vLLM on a CPU uses Triton only if it finds a backend of this name; the interpreter needs none.
    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    rows, logits = torch.arange(len(sampling)), logits.clone()
    temperature = torch.tensor([p.temperature for p in sampling])
    apply_temperature(logits, rows, temperature)
    apply_min_p(logits, rows, torch.tensor([p.min_p for p in sampling]))
    top_k, top_p = torch.tensor([p.top_k or VOCAB_SIZE for p in sampling]), torch.tensor([p.top_p for p in sampling])
    logits = apply_top_k_top_p_pytorch(logits, top_k, top_p)
    seeds = torch.from_numpy(np.array([p.seed for p in sampling], dtype=np.uint64).view(np.int64))
    before = torch.tensor(at) - 1  # the position of the token that each row is computed from
    chosen: list[int] = gumbel_sample(logits, rows, temperature, seeds, before, False, False).tolist()
    return chosen


def drawn(rng: np.random.Generator, top_p: float) -> SamplingParams:
    seed, min_p = int(rng.integers(0, MAX_SEED, dtype=np.uint64)), float(rng.choice([0.0, 0.1]))
    temperature, top_k = float(rng.choice([0.7, 1.0, 1.4])), 50 if top_p < 1.0 else 0
    return SamplingParams(temperature, top_k, top_p, min_p, seed, noise=Noise.VLLM)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_vllms_own(seed: int, top_p: float) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(scale=2.0, size=(NUM_ROWS, VOCAB_SIZE))).float()
    sampling, at = [drawn(rng, top_p) for _ in range(NUM_ROWS)], [int(t) for t in rng.integers(1, 10**5, NUM_ROWS)]
    tokens = stock(logits, sampling, at)
    assert choose_tokens(logits.numpy(), sampling, at) == tokens
    assert choose_tokens(logits, sampling, at) == tokens
    assert choose_tokens(logits.numpy(), sampling, [t + 1 for t in at]) != tokens
