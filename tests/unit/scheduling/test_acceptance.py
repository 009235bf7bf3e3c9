"""Estimates of acceptance, per session and per margin of a draft token, follow the true rate and forget old results."""

from __future__ import annotations

import random

import pytest

from specdec.inference.model.proposer import DraftToken
from specdec.inference.scheduling.acceptance import Acceptance, Confidence


@pytest.mark.parametrize("truth", [0.1, 0.5, 0.9])
def test_acceptance_follows_the_truth(truth: float) -> None:
    """The estimate of acceptance follows the true probability.

    Tokens after the first rejection do not count, since they were not tested and would lower the estimate.
    """
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


def token(margin: float) -> DraftToken:
    return DraftToken(5, 6, margin)


def test_more_lead_is_more_confidence_from_the_start() -> None:
    confidence = Confidence()
    rates = [confidence.rate(token(margin)) for margin in (0.05, 0.3, 1.2, 5.0, 20.0)]
    assert rates == sorted(rates)
    assert 0.5 <= rates[0] < rates[-1] < 1.0


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.98])
def test_rates_follow_the_truth_apart(truth: float) -> None:
    rng, confidence = random.Random(3), Confidence()
    before = confidence.rate(token(0.3))
    for _ in range(1000):
        confidence.record(token(3.5), accepted=rng.random() < truth)
    assert confidence.rate(token(3.5)) == pytest.approx(truth, abs=0.08)
    assert confidence.rate(token(0.3)) == before


def test_tokens_without_a_lead_are_judged_by_themselves() -> None:
    """Results of draft tokens without a margin over a second choice, as from lookup, do not count for others."""
    confidence = Confidence()
    for _ in range(500):
        confidence.record(DraftToken(5), accepted=False)
    assert confidence.rate(DraftToken(5)) < 0.05
    assert confidence.rate(token(20.0)) > 0.9
