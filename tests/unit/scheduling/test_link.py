"""Round trips are measured from a message to the target's acknowledgement, without the time spent at the target."""

from __future__ import annotations

import pytest

from specdec.inference.request import Schedule
from specdec.inference.scheduling.link import Link


def test_a_commit_answers_the_last_message_that_had_arrived() -> None:
    link = Link()
    for i in range(4):
        link.sent(2 * i + 2, 1.0 + 0.1 * i)
    link.received(5, 0.02, 1.18)  # two of the four messages, the second of them held for 20 ms
    assert link.round_trip_s == pytest.approx(1.18 - 1.1 - 0.02)
    link.received(0, 0.0, 9.0)  # nothing new
    assert link.round_trip_s == pytest.approx(0.06)


def test_minimum_of_late_counts_forgets_old_samples() -> None:
    link = Link()
    for seconds in (0.01, 0.05, 0.03):
        link.record_round_trip(seconds)
    assert link.round_trip_s == 0.01
    for _ in range(40):  # the network has changed
        link.record_round_trip(0.2)
    assert link.round_trip_s == 0.2


def test_a_session_begins_with_what_the_one_before_it_measured() -> None:
    """A new session starts from the pass time and round trip that the previous session measured.

    Regression: a new session knew neither, so it drafted gamma tokens and then waited for a
    commit.
    """
    earlier = Link()
    earlier.record_round_trip(0.05)
    for seconds in (0.9, 0.02, 0.02):  # the first pass reads the prompt
        earlier.record_pass(seconds)
    link = Link(earlier)
    assert (link.round_trip_s, link.pass_s) == (0.05, 0.02)
    link.record_pass(0.9)
    assert link.pass_s == 0.02
    link.record_round_trip(0.2)  # the network has changed since
    assert link.round_trip_s == 0.2


def test_nothing_is_known_of_a_target_before_its_first_session() -> None:
    assert (Link().round_trip_s, Link().pass_s) == (0.0, 0.0)
    assert (Link(Link()).round_trip_s, Link(Link()).pass_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("round_trip_s", "pass_s", "expected"),
    [(0.001, 0.03, Schedule.SYNC), (0.07, 0.03, Schedule.ASYNC), (0.001, 0.015, Schedule.ASYNC)],
)
def test_a_near_and_crowded_target_gets_rounds(round_trip_s: float, pass_s: float, expected: Schedule) -> None:
    """A draft drafts in rounds for a near target whose passes take twice as long as over one session, else ahead."""
    assert Link().schedule is Schedule.ASYNC
    earlier = Link()
    earlier.record_round_trip(round_trip_s)
    earlier.record_pass(0.01)
    link = Link(Link(earlier))
    for _ in range(9):
        link.record_pass(pass_s)
    assert link.schedule is expected
