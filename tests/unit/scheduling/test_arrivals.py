"""When the next draft tokens are due: gaps within a chain and restarts after a rejection are learnt apart."""

from __future__ import annotations

import pytest

from inference.scheduling.arrivals import Arrivals

LONG_S = 100.0


def test_nothing_is_due_before_anything_came() -> None:
    arrivals = Arrivals()
    assert arrivals.late_in(1.0, at_most_s=LONG_S) is None
    arrivals.proposed(1.0, 4)
    assert arrivals.late_in(1.0, at_most_s=LONG_S) is None  # one message has no gap


def test_a_running_chain_is_due_one_gap_after_its_last_message() -> None:
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
