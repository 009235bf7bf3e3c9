"""The round trip from echoes: holding is subtracted, what was never acknowledged is not counted."""

from __future__ import annotations

import pytest

from inference.scheduling.round_trip import Echoes, RoundTrip


def test_unknown_before_anything_came_back() -> None:
    assert RoundTrip().seconds == 0.0


def test_a_commit_answers_the_last_message_that_had_arrived() -> None:
    round_trip = RoundTrip()
    echoes = Echoes(round_trip)
    for i in range(4):
        echoes.sent(2 * i + 2, 1.0 + 0.1 * i)
    echoes.received(5, 0.02, 1.18)  # two of the four messages, the second of them held for 20 ms
    assert round_trip.seconds == pytest.approx(1.18 - 1.1 - 0.02)
    echoes.received(0, 0.0, 9.0)  # nothing new
    assert round_trip.seconds == pytest.approx(0.06)


def test_minimum_of_late_counts_forgets_old_samples() -> None:
    round_trip = RoundTrip()
    for seconds in (0.01, 0.05, 0.03):
        round_trip.record(seconds)
    assert round_trip.seconds == 0.01
    for _ in range(40):  # the network has changed
        round_trip.record(0.2)
    assert round_trip.seconds == 0.2
