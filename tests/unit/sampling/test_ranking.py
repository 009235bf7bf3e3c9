"""The best tokens of a row: the first is the choice, others follow by score, equal in every library."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specdec.inference.request import SamplingParams
from specdec.inference.sampling.choice import choose_tokens, rank_tokens
from specdec.inference.sampling.noise import gumbel_noise, noise_keys
from specdec.inference.sampling.truncation import process_logits

VOCAB_SIZE = 300
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_k=20, seed=2),
    SamplingParams(temperature=1.0, top_p=0.8, seed=3),
    SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.0, seed=4),
    SamplingParams(logit_bias=((5, 30.0),)),
]


def some_logits(num_rows: int) -> np.ndarray:
    return np.random.default_rng(num_rows).normal(0.0, 2.0, (num_rows, VOCAB_SIZE)).astype(np.float32)


def naive(logits: np.ndarray, params: SamplingParams, position: int) -> np.ndarray:
    """Return the scores of one row, by the definition."""
    row = logits.astype(np.float64)
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    if params.greedy:
        return row
    keys = np.asarray(noise_keys([params.seed], [position]))
    noise = gumbel_noise(keys[:, None], np.arange(VOCAB_SIZE)[None, :])
    scores: np.ndarray = (process_logits(row[None].astype(np.float32), [params]) + noise)[0]
    return scores


@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS[:1] * 6, SETTINGS[1:2] * 6, SETTINGS[2:4] * 3])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_best_by_score(settings: list[SamplingParams], count: int) -> None:
    logits, positions = some_logits(len(settings)), [10 + row for row in range(len(settings))]
    kept = logits.copy()
    ranked = rank_tokens(logits, settings, positions, count=count)
    assert np.array_equal(logits, kept)
    assert [row[0][0] for row in ranked] == choose_tokens(logits, settings, positions)
    for row, (params, position) in enumerate(zip(settings, positions, strict=True)):
        scores = naive(logits[row], params, position)
        best = np.argsort(-scores, kind="stable")[:count]
        assert [token_id for token_id, _ in ranked[row]] == best.tolist()
        assert [score for _, score in ranked[row]] == pytest.approx(scores[best].tolist(), abs=1e-6)


def test_torch_ranks_alike() -> None:
    logits, positions = some_logits(len(SETTINGS)), list(range(len(SETTINGS)))
    ranked = rank_tokens(logits, SETTINGS, positions, count=3)
    assert [[t for t, _ in row] for row in ranked] == [
        [t for t, _ in row] for row in rank_tokens(torch.from_numpy(logits), SETTINGS, positions, count=3)
    ]


def test_nothing_comes_second_where_one_token_is_left() -> None:
    ((_, (_, score)),) = rank_tokens(some_logits(1), [SamplingParams(temperature=1.0, top_k=1)], [3], count=2)
    assert score == -math.inf
