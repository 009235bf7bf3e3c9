"""The width of a run-ahead pass: the greedy choice is the best one, and the estimates behind it follow the truth."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.scheduling.acceptance import Acceptance
from inference.scheduling.pass_times import PassCosts, PassTimes
from inference.scheduling.waiting import waiting_pays
from inference.scheduling.widths import choose_widths

SESSIONS = st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 1.0)), min_size=1, max_size=3)


def tokens_per_s(widths: tuple[int, ...], rates: list[float], base_s: float, slope_s: float) -> float:
    """Expected throughput of one pass, written from the definition."""
    tokens = sum(sum(rate**k for k in range(width + 1)) for rate, width in zip(rates, widths, strict=True))
    return tokens / (base_s + slope_s * sum(widths))


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
    """The more sessions share a pass, the fewer draft tokens each of them gets."""
    widths = [choose_widths([8] * n, [0.7] * n, base_s=0.01, slope_s=0.0007)[0] for n in (1, 4, 16, 64)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


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


def test_what_a_crowd_costs_is_not_held_against_a_single_session() -> None:
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


DELAYS = st.floats(0.0, 0.1)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 8), st.floats(0.0, 1.0), st.floats(1e-3, 0.05), DELAYS, DELAYS)
def test_who_would_not_wait_does_not_wait_longer(
    num_tokens: int, rate: float, pass_s: float, one_s: float, other_s: float
) -> None:
    """Within one pass: beyond it, what comes has to agree with more tokens of the target's own."""
    shorter_s, longer_s = sorted((one_s % pass_s, other_s % pass_s))
    if waiting_pays(longer_s, num_tokens, rate, pass_s=pass_s, slope_s=0.0) and shorter_s > 0:
        assert waiting_pays(shorter_s, num_tokens, rate, pass_s=pass_s, slope_s=0.0)


def test_waiting_is_worth_a_good_draft_and_a_short_way() -> None:
    def pays(delay_s: float, rate: float) -> bool:
        return waiting_pays(delay_s, 4, rate, pass_s=0.010, slope_s=0.0005)

    assert pays(0.003, 0.7)
    assert not pays(0.003, 0.1)  # a poor draft
    assert not pays(0.040, 0.7)  # a long way
    assert not waiting_pays(0.003, 4, 0.7, pass_s=0.0, slope_s=0.0)  # nothing is known yet


@pytest.mark.parametrize(("delay_s", "rate"), [(0.003, 0.7), (0.003, 0.1), (0.009, 0.6), (0.025, 0.9), (0.04, 0.7)])
def test_waiting_is_decided_as_a_simulation_of_both_would(delay_s: float, rate: float) -> None:
    waiting, alone = (simulated_tokens_per_s(delay_s, rate, waits) for waits in (True, False))
    assert waiting_pays(delay_s, 4, rate, pass_s=0.01, slope_s=0.0) == (waiting > alone)


def simulated_tokens_per_s(delay_s: float, rate: float, waits: bool) -> float:
    """A target that gets 4 draft tokens `delay_s` after each rejection, and either waits or decodes meanwhile."""
    rng, now, tokens = random.Random(0), 0.0, 0
    for _ in range(4000):
        accepted = next((k for k in range(4) if rng.random() >= rate), 4)
        now, tokens = now + 0.01, tokens + accepted + 1
        agrees = accepted == 4
        while not agrees:
            if waits:
                now, agrees = now + delay_s, True
                continue
            num_alone = math.ceil(delay_s / 0.01)
            now, tokens = now + 0.01 * num_alone, tokens + num_alone
            agrees = all(rng.random() < rate for _ in range(num_alone))
    return tokens / now
