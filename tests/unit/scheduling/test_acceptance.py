"""The estimate of a draft's acceptance follows the truth, and forgets."""

from __future__ import annotations

import random

import pytest

from inference.scheduling.acceptance import Acceptance


@pytest.mark.parametrize("truth", [0.1, 0.5, 0.9])
def test_acceptance_follows_the_truth(truth: float) -> None:
    """Only tokens up to the first rejection were tested; counting the rest would bias the rate downwards."""
    rng = random.Random(1)
    acceptance = Acceptance()
    for _ in range(400):
        accepted = next((k for k in range(4) if rng.random() >= truth), 4)
        acceptance.record(4, accepted)
    assert acceptance.rate == pytest.approx(truth, abs=0.12)


def test_a_draft_that_was_given_up_gets_another_chance() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.record(4, 0)
    given_up = acceptance.rate
    for _ in range(300):
        acceptance.record(0, 0)
    assert given_up < 0.15
    assert acceptance.rate > 0.6
