"""Figures of one request (times, acceptance, bytes), computed from messages that arrive at known times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from specdec.inference.commit import Commit, Counts
from specdec.inference.observe.stats import MAX_PASS_TOKENS, RequestStats


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the clock by one that starts at 1 s, and moves on by a second each time it is read."""
    ticks = itertools.count(1)
    monkeypatch.setattr("specdec.inference.observe.stats.time.monotonic", lambda: float(next(ticks)))
    return iter(())


@pytest.mark.usefixtures("clock")
def test_times_to_tokens_follow_from_times_of_messages() -> None:
    """Times per token follow from the arrival times of messages: here of 3, 1 and 2 tokens, at 1, 2 and 3 s."""
    stats = RequestStats(started=0.0)
    for num_tokens in (3, 1, 2):
        stats.take(Commit(0, (7,) * num_tokens, counts=Counts(bytes_up=10, bytes_down=5)))
    assert (stats.ttft_s, stats.end_to_end_s) == (1.0, 3.0)
    assert stats.itl_s == [1.0, 1.0]
    assert stats.num_output_tokens == 6
    assert stats.tpot_s == pytest.approx(2 / 5)
    assert stats.tokens_per_s == 2.0
    assert stats.wire_bytes == 45
    assert stats.acceptance_rate is None
    assert stats.mean_acceptance_length is None


def test_acceptance_counts_only_passes_with_draft_tokens() -> None:
    """Acceptance counts only passes that verified draft tokens; other passes only add to the output tokens."""
    stats = RequestStats()
    stats.take(Commit(0, (7,) * 3, 4, 2))
    stats.take(Commit(0, (7,) * 1, 2, 0))
    stats.take(Commit(0, (7,) * 1, 0, 0))
    stats.take(Commit(0, (7,) * 3, 2, 2))
    assert stats.acceptance_rate == 4 / 8
    assert stats.mean_acceptance_length == pytest.approx(7 / 3)
    assert stats.drafted_by_position == [3, 3, 1, 1]
    assert stats.accepted_by_position == [2, 2]


def test_a_request_without_tokens_has_times_of_zero() -> None:
    stats = RequestStats()
    assert (stats.ttft_s, stats.end_to_end_s, stats.tokens_per_s, stats.itl_s) == (0.0, 0.0, 0.0, [])
    assert stats.tpot_s is None


def test_one_token_has_no_time_per_further_one() -> None:
    stats = RequestStats()
    stats.take(Commit(0, (7,) * 1, 0, 0))
    assert stats.tpot_s is None


def test_an_impossible_count_makes_no_long_list() -> None:
    """A number of draft tokens that no pass can have takes no memory at the client.

    Regression: a message of a hostile server with num_draft_tokens of four billion took 34 GB at the client.
    """
    stats = RequestStats()
    stats.take(Commit(0, (1,), num_draft_tokens=2**32 - 1, num_accepted_tokens=2**32 - 1))
    assert len(stats.passes_by_draft_tokens) == MAX_PASS_TOKENS + 1
