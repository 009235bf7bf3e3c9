"""Log-probabilities are torch's log-softmax of the raw logits, and the best come first."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from specdec.inference.sampling.logprobs import LOWEST, token_logprobs


@pytest.mark.parametrize("num_top", [0, 1, 5, 40])
def test_they_are_the_log_softmax(num_top: int) -> None:
    logits = np.random.default_rng(1).normal(scale=4.0, size=(3, 20)).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    for array in (logits, torch.from_numpy(logits)):
        for row, position in enumerate(token_logprobs(array, [4, 0, 19], num_top)):
            token_id = [4, 0, 19][row]
            assert position.token_ids[0] == token_id
            assert position.logprobs[0] == pytest.approx(expected[row, token_id], abs=1e-12)
            best = np.argsort(-expected[row])[:num_top].tolist()
            assert list(position.token_ids[1:]) == best
            assert list(position.logprobs[1:]) == pytest.approx(expected[row, best].tolist())


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, -torch.inf]], dtype=torch.bfloat16)
    (position,) = token_logprobs(logits, [4], 2)
    assert list(position.token_ids[1:]) == [1, 2]
    assert position.logprobs[0] == LOWEST


def test_they_are_nothing_to_a_garbage_collection() -> None:
    """The log-probabilities of prompts are few objects, so the garbage collector has little to search.

    Regression: a few prompts' log-probabilities were 80,000 objects, and a full garbage collection took 100
    ms.
    """
    scores = token_logprobs(np.zeros((8, 32), np.float32), range(8), num_top=20)
    gc.collect()
    assert not any(gc.is_tracked(column) for each in scores for column in (each.token_ids, each.logprobs))
