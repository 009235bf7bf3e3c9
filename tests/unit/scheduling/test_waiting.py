"""A target waits for draft tokens, up to a limit, only if that gives more tokens per second than going on."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.inference.scheduling.pass_times import PassCosts
from specdec.inference.scheduling.waiting import MAX_WAIT_OF_PASS, Arrivals, wait_s, waiting_pays

LONG_S = 100.0


def test_nothing_is_due_before_anything_came() -> None:
    arrivals = Arrivals()
    assert arrivals.late_in(1.0, at_most_s=LONG_S) is None
    arrivals.proposed(1.0, 4)
    assert arrivals.late_in(1.0, at_most_s=LONG_S) is None  # one message has no gap


def test_a_chain_is_due_a_gap_after_its_message() -> None:
    arrivals = Arrivals()
    for i in range(60):
        arrivals.proposed(0.002 * i, 1)
    arrivals.committed(0.1185, all_accepted=True)
    assert arrivals.delay_s == pytest.approx(0.002)
    assert arrivals.late_in(0.119, at_most_s=LONG_S) == pytest.approx(0.118 + 0.002 - 0.119, abs=1e-5)


def test_a_rejection_costs_a_round_trip() -> None:
    arrivals = Arrivals()
    for start in range(40):
        arrivals.committed(start, all_accepted=False)
        arrivals.proposed(start + 0.1, 3)  # round trip
        arrivals.proposed(start + 0.102, 3)
    arrivals.committed(40.0, all_accepted=False)
    assert arrivals.delay_s == pytest.approx(0.1)
    assert arrivals.late_in(40.0, at_most_s=LONG_S) == pytest.approx(0.1, rel=1e-3)
    arrivals.proposed(40.1, 3)
    assert arrivals.delay_s == pytest.approx(0.002)


def test_an_unsteady_draft_is_given_more_time() -> None:
    arrivals = Arrivals()
    for start in range(40):
        arrivals.committed(start, all_accepted=False)
        arrivals.proposed(start + (0.05 if start % 2 else 0.15), 3)
    arrivals.committed(40.0, all_accepted=False)
    late_s = arrivals.late_in(40.0, at_most_s=LONG_S)
    assert late_s is not None
    assert 0.15 < late_s < 0.25
    assert arrivals.late_in(40.0, at_most_s=0.12) == pytest.approx(0.12)  # but never more than the limit


def test_a_silent_draft_is_overdue_and_stays_so() -> None:
    arrivals = Arrivals()
    arrivals.proposed(0.0, 1)
    arrivals.proposed(0.002, 1)
    late_s = arrivals.late_in(10.0, at_most_s=LONG_S)
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
def test_a_longer_delay_never_pays_more(
    num_tokens: int, rate: float, pass_s: float, one_s: float, other_s: float
) -> None:
    """If it pays to wait for draft tokens that come after a delay, it also pays with any shorter delay.

    `one_s` and `other_s`, modulo `pass_s`, are the two delays.
    """
    shorter_s, longer_s = sorted((one_s % pass_s, other_s % pass_s))
    if waiting_pays(longer_s, num_tokens, rate, pass_s=pass_s, verify_s=pass_s) and shorter_s > 0:
        assert waiting_pays(shorter_s, num_tokens, rate, pass_s=pass_s, verify_s=pass_s)


def test_no_wait_pays_while_no_time_is_known() -> None:
    assert not waiting_pays(0.003, 4, 0.7, pass_s=0.0, verify_s=0.0)


@pytest.mark.parametrize(("delay_s", "rate"), [(0.003, 0.7), (0.003, 0.1), (0.009, 0.6), (0.025, 0.9), (0.04, 0.7)])
def test_waiting_is_decided_as_a_simulation_of_both_would(delay_s: float, rate: float) -> None:
    waiting, alone = (simulated_tokens_per_s(delay_s, rate, waits) for waits in (True, False))
    assert waiting_pays(delay_s, 4, rate, pass_s=0.01, verify_s=0.01) == (waiting > alone)


def simulated_tokens_per_s(delay_s: float, rate: float, waits: bool) -> float:
    """Return tokens/s of a simulated target, to which 4 draft tokens come `delay_s` after a rejection.

    Args:
        delay_s: the delay of new draft tokens.
        rate: probability that a draft token is right.
        waits: whether the target waits for them; else it decodes alone meanwhile.
    """
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


@pytest.mark.parametrize("gap_s", [0.001, 0.008, 0.02, 0.5])
def test_no_wait_is_longer_than_its_limit(gap_s: float) -> None:
    """A wait for draft tokens has a limit; if they usually come too late for it, the target does not wait.

    `gap_s` is the time from a rejection to the next draft tokens.
    """
    costs, arrivals, now = PassCosts(), Arrivals(), 100.0
    for width in (0, 4) * 20:
        costs.record(width, 0.010 + 0.0001 * width)
    for _ in range(30):  # every proposal is rejected, and the next comes `gap_s` later
        arrivals.committed(now, all_accepted=False)
        now += gap_s
        arrivals.proposed(now, 2)
        now += 0.01
    arrivals.committed(now, all_accepted=False)
    longest_s = MAX_WAIT_OF_PASS * costs.seconds(0)
    waits = [wait_s(arrivals, 0.8, costs, now=now + ready_s, ready_s=ready_s) for ready_s in (0.0, longest_s)]
    assert waits[0] <= longest_s
    assert (waits[0] > 0) == (gap_s == 0.001)  # what comes soon is worth waiting for
    assert waits[1] <= 0


def test_nothing_is_waited_for_before_anything_came() -> None:
    assert wait_s(Arrivals(), 0.8, PassCosts(), now=100.0, ready_s=0.0) == 0.0


def test_more_tokens_of_its_own_shorten_the_wait() -> None:
    """The more tokens passes give without a draft worker, by lookup or grammar, the shorter waits for a worker pay."""

    def longest(num_own: float) -> int:
        waits = [waiting_pays(ms / 1e3, 4, 0.8, pass_s=0.010, verify_s=0.010, num_own=num_own) for ms in range(40)]
        return sum(waits)

    assert longest(1.0) > longest(1.5) > longest(5.0)
    assert longest(1.0) == sum(waiting_pays(ms / 1e3, 4, 0.8, pass_s=0.010, verify_s=0.010) for ms in range(40))
