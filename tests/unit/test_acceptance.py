"""The expected acceptance of a draft token for each scheme of drawing and accepting tokens (benchmarks.acceptance)."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.acceptance import DRAWN, acceptances, answer, coupled, expected
from benchmarks.decoding import load_model
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec.inference.request import SamplingParams
from specdec.inference.sampling.choice import choose_tokens

P, Q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.3, 0.4, 0.2])


def test_shared_noise_has_the_acceptance_of_its_own_draws() -> None:
    """The expected acceptance with shared random numbers is that of 40,000 draws, up to 0.01 (four standard errors)."""
    count = 40_000
    laws = [np.log(np.tile(law, (count, 1))) for law in (P, Q)]
    drawn = [choose_tokens(law, [SamplingParams(temperature=1.0, seed=3)] * count, range(count)) for law in laws]
    assert np.mean(np.array(drawn[0]) == np.array(drawn[1])) == pytest.approx(coupled(P, Q), abs=0.01)


def test_schemes_have_their_order_and_equal_laws_their_limits() -> None:
    found = {scheme: float(values[0]) for scheme, values in expected(P[None], Q[None]).items()}
    assert found["rejection sampling"] == pytest.approx(0.1 + 0.3 + 0.15 + 0.05)
    assert found["greedy draft"] == pytest.approx(0.15)
    assert found["independent draws"] == pytest.approx(0.05 + 0.09 + 0.06 + 0.01)
    assert found["no communication"] <= found["shared noise"] <= found["rejection sampling"]
    same = {scheme: float(values[0]) for scheme, values in expected(P[None], P[None]).items()}
    assert same["shared noise"] == pytest.approx(1.0)
    assert same["independent draws"] == pytest.approx((P**2).sum())


def test_a_model_agrees_with_itself_and_less_with_its_draft() -> None:
    target, draft = (
        load_model(path, backend="torch", dtype="float32", threads=1) for path in (BUNDLED_TARGET, BUNDLED_DRAFT)
    )
    sampling = SamplingParams(temperature=0.8, seed=5)
    prompt = [1, 5, 7]
    token_ids = answer(target, prompt, sampling, 12)
    assert len(token_ids) == len(prompt) + 12
    own = acceptances(target, target, token_ids, len(prompt), sampling)
    assert own[DRAWN].tolist() == [1.0] * 12
    assert own["rejection sampling"] == pytest.approx(1.0)
    other = acceptances(target, draft, token_ids, len(prompt), sampling)
    assert other["shared noise"].mean() < other["rejection sampling"].mean() < 1.0
