"""Confidence follows what happened to tokens of a like margin, and to no others."""

from __future__ import annotations

import random

import pytest

from inference.model.proposer import DraftToken
from inference.scheduling.confidence import Confidence


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
    """A proposer that gives none, such as prompt lookup, learns its mean acceptance."""
    confidence = Confidence()
    for _ in range(500):
        confidence.record(DraftToken(5), accepted=False)
    assert confidence.rate(DraftToken(5)) < 0.05
    assert confidence.rate(token(20.0)) > 0.9
