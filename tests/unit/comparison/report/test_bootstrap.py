"""Confidence intervals of ratios of times: they find a real difference, and show none where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.comparison.report.bootstrap import MIN_PAIRS, paired_ratio, stratified_ratio

NUM_TRIALS = 200


def _paired(rng: np.random.Generator, num_pairs: int, ratio: float) -> tuple[list[float], list[float]]:
    """Return (times before, times after), one of each per prompt, where after over before is about `ratio`.

    Prompts' times differ much, and each time is scattered by 5 %.
    """
    prompts = np.exp(rng.normal(0.0, 1.0, num_pairs))
    before, after = (prompts * np.exp(rng.normal(0.0, 0.05, num_pairs)) for _ in range(2))
    return list(before), list(after * ratio)


@pytest.mark.parametrize("num_pairs", [5, 12])
def test_intervals_cover_the_truth_at_their_confidence(num_pairs: int) -> None:
    rng = np.random.default_rng(3)
    found = [paired_ratio(*_paired(rng, num_pairs, 1.3)) for _ in range(NUM_TRIALS)]
    covered = sum(ratio.low <= 1.3 <= ratio.high for ratio in found) / NUM_TRIALS
    assert 0.91 <= covered <= 0.99


def test_uninterleaved_runs_are_compared_by_prompt() -> None:
    """Runs that are not interleaved are compared prompt by prompt, so three runs of each server find a ratio of 1.2.

    The times of prompts differ among one another by far more than this ratio.
    """
    rng = np.random.default_rng(4)
    found = []
    for _ in range(NUM_TRIALS):
        prompts = np.exp(rng.normal(0.0, 1.0, 4))
        sides = [{str(i): prompt * np.exp(rng.normal(0, 0.05, 3)) for i, prompt in enumerate(prompts)} for _ in "ab"]
        found.append(stratified_ratio(sides[0], {key: 1.2 * values for key, values in sides[1].items()}))
    covered = sum(ratio.low <= 1.2 <= ratio.high for ratio in found) / NUM_TRIALS
    assert 0.91 <= covered <= 0.99
    assert sum(ratio.low > 1.0 for ratio in found) / NUM_TRIALS > 0.95


def test_certain_and_undecided_ratios() -> None:
    """If all pairs have one ratio, the interval is a point; below `MIN_PAIRS` pairs no difference is reported."""
    ratio = paired_ratio([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    few = paired_ratio([1.0] * (MIN_PAIRS - 1), [9.0] * (MIN_PAIRS - 1))
    assert (few.differs, str(few)) == (False, "9.00, too few to tell")
