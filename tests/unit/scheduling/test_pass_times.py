"""Learned times of passes follow the measured times, separately for each number of sessions in a pass."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.scheduling.pass_times import MAX_AGE, NUM_RECENT, PassCosts, PassTimes, rising
from specdec.inference.scheduling.widths import choose_widths

TIMES = st.floats(1e-4, 1.0)
PASSES = st.lists(st.tuples(st.integers(0, 300), TIMES), min_size=1, max_size=60)


def stairs(num_draft_tokens: int) -> float:
    """Return the seconds of a pass; kernels compute six tokens at a time, so the time jumps at every sixth token."""
    return 0.004 + 0.002 * (num_draft_tokens // 6)


def table(passes: list[tuple[int, float]]) -> PassCosts:
    costs = PassCosts()
    for num_draft_tokens, seconds in passes:
        costs.record(num_draft_tokens, seconds)
    return costs


@given(PASSES)
def test_the_table_never_falls_nor_leaves_what_was_measured(passes: list[tuple[int, float]]) -> None:
    costs = table(passes)
    seconds = [costs.seconds(number) for number in range(310)]
    assert all(more >= fewer * (1 - 1e-9) for fewer, more in itertools.pairwise(seconds))
    measured = [each for _, each in passes]
    assert min(measured) * (1 - 1e-9) <= seconds[0] <= seconds[-1] <= max(measured) * (1 + 1e-9)


@given(st.integers(0, 4), st.integers(1, 11), TIMES, TIMES)
def test_between_two_numbers_the_table_is_a_line(first: int, apart: int, one_s: float, other_s: float) -> None:
    low_s, high_s = sorted((one_s, other_s))
    costs = table([(first, low_s), (first + apart, high_s)])
    for number in range(first, first + apart + 1):
        expected = low_s + (high_s - low_s) * (number - first) / apart
        assert costs.seconds(number) == pytest.approx(expected)
    assert costs.seconds(first + apart + 5) == high_s


@given(st.lists(st.tuples(TIMES, st.integers(1, 5)), max_size=12), st.lists(TIMES, min_size=12, max_size=12))
def test_no_rising_values_are_nearer(points: list[tuple[float, int]], others: list[float]) -> None:
    values, weights = [value for value, _ in points], [weight for _, weight in points]

    def distance(candidates: list[float]) -> float:
        return sum(w * (v - c) ** 2 for v, w, c in zip(values, weights, candidates, strict=True))

    found = rising(values, weights)
    assert found == sorted(found)
    assert distance(found) <= distance(sorted(others[: len(values)])) + 1e-12


def test_a_staircase_is_recovered_from_disturbed_passes() -> None:
    rng = random.Random(0)
    costs = PassCosts()
    for _ in range(600):
        number = rng.randrange(17)
        delay = 5.0 if rng.random() < 0.05 else 1.0  # another process had the core
        costs.record(number, stairs(number) * delay * (1 + abs(rng.gauss(0, 0.02))))
    for number in range(17):
        assert costs.seconds(number) == pytest.approx(stairs(number), rel=0.1)


def test_many_draft_tokens_need_few_entries() -> None:
    costs = table([(number, stairs(number)) for number in range(0, 256, 5)])
    for number in (20, 40, 100, 250):
        assert costs.seconds(number) == pytest.approx(stairs(number), rel=0.1)


def test_a_slower_machine_is_noticed_at_once() -> None:
    costs = table([(4, 0.01)] * 100 + [(4, 0.03)] * (NUM_RECENT // 2 + 1))
    assert costs.seconds(4) == pytest.approx(0.03)


def test_a_slow_width_is_tried_again() -> None:
    """A number of draft tokens with a slow pass is tried again after a while, or it would never be measured again."""
    costs = table([(0, 0.01), (8, 0.5)])
    assert choose_widths([8], [0.8], costs.seconds) != [8]
    for _ in range(MAX_AGE):
        costs.record(0, 0.01)
    assert choose_widths([8], [0.8], costs.seconds) == [8]


def test_a_single_slow_pass_is_forgotten_sooner() -> None:
    """One slow pass reduces the number of draft tokens for only a short time.

    Regression: after one delayed pass over 5 draft tokens, a server had only 4 in the next 300 passes, all right.
    """
    few, many = table([(4, 0.01), (5, 0.05)]), table([(4, 0.01), *[(5, 0.05)] * NUM_RECENT])
    for _ in range(MAX_AGE // NUM_RECENT):
        few.record(4, 0.01)
        many.record(4, 0.01)
    assert few.seconds(5) == pytest.approx(0.01)
    assert many.seconds(5) == pytest.approx(0.05)


def test_the_first_pass_over_each_number_is_ignored() -> None:
    """The first pass with each number of draft tokens does not count, since a backend allocates memory in it."""
    times = PassTimes()
    assert not times.of(1).is_known
    times.record(1, 0, 0.01)
    assert times.of(1).seconds(3) == 0.0
    times.record(1, 0, 0.01)
    times.record(1, 4, 0.05)
    assert times.of(1).seconds(3) == times.of(1).seconds(4) == 0.01
    times.record(1, 4, 0.02)
    assert times.of(1).seconds(4) == 0.02


def test_crowd_costs_do_not_count_for_one_session() -> None:
    """Times of passes over several sessions do not count for a session that is alone.

    Regression: after passes of eight sessions, draft tokens seemed slow, and none were verified for a session that came
    alone.
    """
    times = PassTimes()
    times.record(8, 32, 0.6)  # the first pass over eight includes one-time preparation
    for width in (0, 16, 32) * 20:
        times.record(8, width, 0.021 + 0.00075 * width)
    times.record(1, 0, 0.1)
    for width in (0, 4) * 6:
        times.record(1, width, 0.006 + 0.0002 * width)
    alone = times.of(1)
    assert [alone.seconds(width) for width in (0, 2, 4)] == pytest.approx([0.006, 0.0064, 0.0068])
    assert choose_widths([4], [0.8], alone.seconds) == [4]
    assert times.of(8).seconds(32) == pytest.approx(0.045)
    assert times.of(7) is times.of(9) is times.of(8)  # the nearest with a slope
