"""Waiting for draft tokens: as a simulation would, for no longer than the limit, and by delays learnt apart."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.scheduling.pass_times import PassCosts
from inference.scheduling.waiting import MAX_WAIT_OF_PASS, Arrivals, wait_s, waiting_pays


def test_nothing_is_due_before_anything_came() -> None:
    arrivals = Arrivals()
    assert arrivals.late_in(1.0) is None
    arrivals.proposed(1.0, 4)
    assert arrivals.late_in(1.0) is None  # one message has no gap


def test_a_chain_is_due_a_gap_after_its_message() -> None:
    arrivals = Arrivals()
    for i in range(60):
        arrivals.proposed(0.002 * i, 1)
    arrivals.committed(0.1185, all_accepted=True)
    assert arrivals.delay_s == pytest.approx(0.002)
    assert arrivals.late_in(0.119) == pytest.approx(0.118 + 0.002 - 0.119, abs=1e-5)


def test_a_rejection_costs_a_round_trip() -> None:
    arrivals = Arrivals()
    for start in range(40):
        arrivals.committed(start, all_accepted=False)
        arrivals.proposed(start + 0.1, 3)  # round trip
        arrivals.proposed(start + 0.102, 3)
    arrivals.committed(40.0, all_accepted=False)
    assert arrivals.delay_s == pytest.approx(0.1)
    assert arrivals.late_in(40.0) == pytest.approx(0.1, rel=1e-3)
    arrivals.proposed(40.1, 3)
    assert arrivals.delay_s == pytest.approx(0.002)


def test_an_unsteady_draft_is_given_more_time() -> None:
    arrivals = Arrivals()
    for start in range(40):
        arrivals.committed(start, all_accepted=False)
        arrivals.proposed(start + (0.05 if start % 2 else 0.15), 3)
    arrivals.committed(40.0, all_accepted=False)
    late_s = arrivals.late_in(40.0)
    assert late_s is not None
    assert 0.15 < late_s < 0.25
    assert arrivals.due_in(40.0) == pytest.approx(0.1, abs=0.02)
    assert arrivals.due_in(41.0) == 0.0


def test_a_silent_draft_is_overdue_and_stays_so() -> None:
    arrivals = Arrivals()
    arrivals.proposed(0.0, 1)
    arrivals.proposed(0.002, 1)
    late_s = arrivals.late_in(10.0)
    assert late_s is not None
    assert late_s < 0


def test_messages_have_a_usual_size() -> None:
    arrivals = Arrivals()
    assert arrivals.num_tokens == 1
    for i in range(30):
        arrivals.proposed(0.01 * i, 4)
    assert arrivals.num_tokens == 4


DELAYS = st.floats(0.0, 0.1)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 8), st.floats(0.0, 1.0), st.floats(1e-3, 0.05), DELAYS, DELAYS)
def test_who_would_not_wait_does_not_wait_longer(
    num_tokens: int, rate: float, pass_s: float, one_s: float, other_s: float
) -> None:
    """Within one pass: beyond it, what comes has to agree with more tokens of the target's own."""
    shorter_s, longer_s = sorted((one_s % pass_s, other_s % pass_s))
    if _pays(longer_s, num_tokens, rate, pass_s=pass_s) and shorter_s > 0:
        assert _pays(shorter_s, num_tokens, rate, pass_s=pass_s)


def _pays(delay_s: float, num_tokens: int, rate: float, *, pass_s: float = 0.010, num_own: float = 1.0) -> bool:
    """Whether waiting pays right after a rejection."""
    return waiting_pays(delay_s, delay_s, num_tokens, rate, pass_s=pass_s, slope_s=0.0, num_own=num_own)


def test_waiting_pays_with_good_drafts_and_short_ways() -> None:
    assert _pays(0.003, 4, 0.7)
    assert not _pays(0.003, 4, 0.1)  # a poor draft
    assert not _pays(0.040, 4, 0.7)  # a long way
    assert not _pays(0.003, 4, 0.7, pass_s=0.0)  # nothing is known yet


DELAYS_AND_RATES = [(0.003, 0.7), (0.003, 0.1), (0.009, 0.6), (0.012, 0.8), (0.025, 0.9), (0.038, 0.9), (0.045, 0.95)]


@pytest.mark.parametrize(("delay_s", "rate"), DELAYS_AND_RATES)
def test_target_waits_when_the_best_simulated_one_would(delay_s: float, rate: float) -> None:
    """A target that waited either at once or never lost up to a tenth where a pass or two fit into the delay."""
    num_fitting = math.floor(delay_s / 0.01)
    decisions = (waiting_pays(delay_s - num * 0.01, delay_s, 4, rate, pass_s=0.01, slope_s=0.0)
                 for num in range(num_fitting + 1))  # fmt: skip
    chosen = next((num for num, pays in enumerate(decisions) if pays), None)
    rates = {num: simulated_tokens_per_s(delay_s, rate, num) for num in (*range(num_fitting + 1), None)}
    assert rates[chosen] >= 0.99 * max(rates.values())


def simulated_tokens_per_s(delay_s: float, rate: float, num_before: int | None) -> float:
    """A target that gets 4 draft tokens `delay_s` after each rejection, and waits after some passes, or never."""
    rng, now, tokens = random.Random(0), 0.0, 0
    num_alone = math.ceil(delay_s / 0.01) if num_before is None else num_before
    for _ in range(4000):
        accepted = next((k for k in range(4) if rng.random() >= rate), 4)
        now, tokens = now + 0.01, tokens + accepted + 1
        agrees = accepted == 4
        while not agrees:
            now, tokens = now + max(delay_s, 0.01 * num_alone), tokens + num_alone
            agrees = all(rng.random() < rate for _ in range(num_alone))
    return tokens / now


@pytest.mark.parametrize("gap_s", [0.001, 0.008, 0.02, 0.5])
def test_no_wait_is_longer_than_its_limit(gap_s: float) -> None:
    """Whatever the draft has done so far; behind the limit, the target decodes by itself."""
    costs, arrivals, now = PassCosts(), Arrivals(), 100.0
    for width in (0, 4) * 20:
        costs.record(width, 0.010 + 0.0001 * width)
    for _ in range(30):  # every proposal is rejected, and the next comes `gap_s` later
        arrivals.committed(now, all_accepted=False)
        now += gap_s
        arrivals.proposed(now, 2)
        now += 0.01
    arrivals.committed(now, all_accepted=False)
    longest_s = MAX_WAIT_OF_PASS * costs.base_s
    waits = [wait_s(arrivals, 0.8, costs, now=now + ready_s, ready_s=ready_s) for ready_s in (0.0, longest_s)]
    assert waits[0] <= longest_s
    assert (waits[0] > 0) == (gap_s == 0.001)  # what comes soon is worth waiting for
    assert waits[1] <= 0


def test_nothing_is_waited_for_before_anything_came() -> None:
    assert wait_s(Arrivals(), 0.8, PassCosts(), now=100.0, ready_s=0.0) == 0.0


def test_who_has_more_of_its_own_waits_less() -> None:
    """With tokens that are looked up or forced, a pass without the draft's is worth several."""

    def longest(num_own: float) -> int:
        return sum(_pays(ms / 1e3, 4, 0.8, num_own=num_own) for ms in range(10))

    assert longest(1.0) > longest(1.5) > longest(5.0)
