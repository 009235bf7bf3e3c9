"""What is learned of pass times follows the truth, and one number of sessions says nothing of another."""

from __future__ import annotations

import random

import pytest

from inference.scheduling.pass_times import PassCosts, PassTimes
from inference.scheduling.widths import choose_widths


def test_costs_are_recovered_from_noisy_passes() -> None:
    rng = random.Random(0)
    costs = PassCosts()
    for _ in range(300):
        width = rng.choice([0, 1, 4, 8])
        costs.record(width, 0.009 + 0.0006 * width + rng.gauss(0, 0.0002))
    assert costs.slope_s == pytest.approx(0.0006, rel=0.25)
    assert costs.base_s == pytest.approx(0.009, rel=0.1)


@pytest.mark.parametrize("widths", [[], [1], [5, 5, 5]])
def test_one_width_says_nothing_about_the_slope(widths: list[int]) -> None:
    costs = PassCosts()
    for width in widths:
        costs.record(width, 0.01)
    assert costs.slope_s == 0.0
    assert costs.base_s == pytest.approx(0.01 if widths else 0.0)


def test_crowd_costs_do_not_count_for_one_session() -> None:
    """After eight sessions in rounds, the next session alone had no draft token verified for a whole answer: their
    passes, and the one that prepared for them, made it look as if draft tokens cost that much."""
    times = PassTimes()
    times.record(8, 32, 0.6)  # the first over eight: the backend prepares
    for _ in range(50):
        times.record(8, 32, 0.045)
    times.record(1, 0, 0.1)
    for width in (0, 4) * 5:
        times.record(1, width, 0.006 + 0.0002 * width)
    alone = times.of(1)
    assert alone.base_s == pytest.approx(0.006)
    assert alone.slope_s == pytest.approx(0.0002)
    assert choose_widths([4], [0.8], base_s=alone.base_s, slope_s=alone.slope_s) == [4]
    assert times.of(8).base_s == pytest.approx(0.045)
    assert times.of(7) is times.of(8)  # the nearest that is known


def test_nothing_is_known_before_the_second_pass() -> None:
    times = PassTimes()
    assert times.of(1).base_s == 0.0
    times.record(1, 0, 0.01)
    assert times.of(1).base_s == 0.0
