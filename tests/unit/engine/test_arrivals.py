"""When the next draft token is due: gaps within a chain and restarts after a rejection are learnt apart."""

from __future__ import annotations

import pytest

from inference.engine.arrivals import Arrivals


def test_nothing_is_due_before_anything_came() -> None:
    arrivals = Arrivals()
    assert arrivals.due_in(1.0) is None
    arrivals.proposed(1.0)
    assert arrivals.due_in(1.0) is None  # one message has no gap


def test_a_running_chain_is_due_one_gap_after_its_last_message() -> None:
    arrivals = Arrivals()
    for i in range(20):
        arrivals.proposed(0.002 * i)
    arrivals.committed(0.0385, all_accepted=True)
    assert arrivals.due_in(0.039) == pytest.approx(0.038 + 0.002 - 0.039)


def test_a_rejection_costs_a_round_trip() -> None:
    arrivals = Arrivals()
    for start in (0.0, 1.0, 2.0):
        arrivals.committed(start, all_accepted=False)
        arrivals.proposed(start + 0.1)  # round trip
        arrivals.proposed(start + 0.102)
    arrivals.committed(3.0, all_accepted=False)
    assert arrivals.due_in(3.0) == pytest.approx(0.1)
    arrivals.proposed(3.1)
    assert arrivals.due_in(3.1) == pytest.approx(0.002)


def test_a_silent_draft_is_overdue_and_stays_so() -> None:
    arrivals = Arrivals()
    arrivals.proposed(0.0)
    arrivals.proposed(0.002)
    due = arrivals.due_in(10.0)
    assert due is not None
    assert due < 0
