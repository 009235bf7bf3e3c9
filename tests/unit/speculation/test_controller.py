"""The width of a run-ahead pass: the greedy choice is the best one, and the estimates behind it follow the truth."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.speculation.controller import (
    MAX_BRANCH_DEPTH,
    MIN_ROUND_TRIP_OF_PASS,
    NO_BRANCHES,
    Acceptance,
    PassCosts,
    choose_branching,
    choose_widths,
)

SESSIONS = st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 1.0)), min_size=1, max_size=3)


def tokens_per_s(widths: tuple[int, ...], rates: list[float], base_s: float, slope_s: float) -> float:
    """Expected throughput of one pass, written from the definition."""
    tokens = sum(sum(rate**k for k in range(width + 1)) for rate, width in zip(rates, widths, strict=True))
    return tokens / (base_s + slope_s * (len(widths) + sum(widths)))


@settings(max_examples=300, deadline=None)
@given(SESSIONS, st.floats(1e-4, 0.1), st.floats(1e-6, 0.02))
def test_no_other_widths_give_more_tokens_per_second(
    sessions: list[tuple[int, float]], base_s: float, slope_s: float
) -> None:
    available, rates = [n for n, _ in sessions], [rate for _, rate in sessions]
    chosen = tuple(choose_widths(available, rates, base_s=base_s, slope_s=slope_s))
    every = itertools.product(*(range(n + 1) for n in available))
    best = max(tokens_per_s(widths, rates, base_s, slope_s) for widths in every)
    assert tokens_per_s(chosen, rates, base_s, slope_s) == pytest.approx(best, rel=1e-9)


def test_a_flat_pass_takes_all_and_a_poor_draft_nothing() -> None:
    assert choose_widths([8, 3], [0.5, 0.1], base_s=0.01, slope_s=0.0) == [8, 3]
    assert choose_widths([8], [0.05], base_s=0.01, slope_s=0.001) == [0]
    assert choose_widths([], [], base_s=0.01, slope_s=0.001) == []


def test_load_narrows_speculation() -> None:
    """The more sessions share a pass, the more of it is slope, and the fewer draft tokens each of them gets."""
    widths = [choose_widths([8] * n, [0.7] * n, base_s=0.01, slope_s=0.0007)[0] for n in (1, 4, 16, 64)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


def test_costs_are_recovered_from_noisy_passes() -> None:
    rng = random.Random(0)
    costs = PassCosts()
    for _ in range(300):
        width = rng.choice([1, 2, 5, 9])
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


def test_prompts_do_not_count_as_passes() -> None:
    costs = PassCosts()
    costs.record(1, 0.01)
    costs.record(2000, 5.0)
    assert costs.base_s == pytest.approx(0.01)


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


SECONDS = st.floats(0.0, 1.0)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 5), SECONDS, SECONDS, SECONDS)
def test_branches_need_a_round_trip_to_save(limit: int, step_s: float, pass_s: float, round_trip_s: float) -> None:
    chosen = choose_branching(limit, step_s=step_s, pass_s=pass_s, round_trip_s=round_trip_s)
    if not (limit and step_s and pass_s) or round_trip_s < MIN_ROUND_TRIP_OF_PASS * pass_s:
        assert chosen == NO_BRANCHES
    else:
        assert chosen.count == limit
        assert 1 <= chosen.depth <= MAX_BRANCH_DEPTH
        assert chosen.depth - 1 < max(1.0, round_trip_s / step_s)


@settings(max_examples=300, deadline=None)
@given(st.floats(1e-4, 0.1), st.floats(1e-3, 0.1), SECONDS, SECONDS)
def test_a_longer_round_trip_never_wants_shallower_branches(
    step_s: float, pass_s: float, one_s: float, other_s: float
) -> None:
    near, far = (
        choose_branching(3, step_s=step_s, pass_s=pass_s, round_trip_s=round_trip_s)
        for round_trip_s in sorted((one_s, other_s))
    )
    assert near.depth <= far.depth
    assert near.count <= far.count
