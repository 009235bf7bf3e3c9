"""How far a draft may run ahead of the committed tokens, and when it sends draft tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.inference.scheduling.pacing import (
    MAX_BRANCH_DEPTH,
    MAX_WINDOW,
    MESSAGE_OF_CHUNK,
    MESSAGE_S,
    MIN_ROUND_TRIP_OF_PASS,
    NO_BRANCHES,
    Measured,
    choose_branching,
    choose_pacing,
    expected_gain,
    is_first_message_complete,
)

SECONDS = st.floats(0.0, 1.0)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 64), st.integers(0, 4), SECONDS, SECONDS, SECONDS)
def test_limits_hold(gamma: int, num_branches: int, step_s: float, pass_s: float, round_trip_s: float) -> None:
    pacing = choose_pacing(gamma, num_branches, Measured(step_s, pass_s, round_trip_s))
    assert gamma <= pacing.window <= MAX_WINDOW
    assert 1 <= pacing.chunk <= max(1, gamma)
    assert pacing.branching.count <= num_branches
    if gamma == 0:
        assert pacing.window == 0


def test_windows_grow_with_round_trips_and_chunks_with_pass_times() -> None:
    near, far = (choose_pacing(4, 0, Measured(0.003, 0.025, rtt_s)) for rtt_s in (0.0, 0.1))
    assert near.window < far.window
    assert (near.num_ahead, far.num_ahead) == (0, 4)
    slow, quick = (choose_pacing(8, 0, Measured(0.001, pass_s, 0.0)) for pass_s in (0.020, 0.0025))
    assert slow.chunk > quick.chunk


def test_window_lasts_for_a_far_and_fast_target() -> None:
    """The limit of tokens ahead of the target (the window) suffices for a whole round trip to a far and fast target.

    Regression: at a round trip of 50 ms and passes of 7 ms, a window of 64 tokens was used up before a
    commit came back.
    """
    pass_s, rtt_s, gamma = 0.0075, 0.05, 8
    pacing = choose_pacing(gamma, 0, Measured(0.0006, pass_s, rtt_s))
    assert pacing.window > (rtt_s + pass_s) / pass_s * (gamma + 1)


@settings(max_examples=300, deadline=None)
@given(st.floats(1e-4, 0.1), st.floats(1e-3, 0.1))
def test_messages_cost_a_small_part_of_their_drafting(step_s: float, pass_s: float) -> None:
    chunk = choose_pacing(64, 0, Measured(step_s, pass_s, 0.0)).chunk
    assert chunk * step_s >= min(MESSAGE_S / MESSAGE_OF_CHUNK, 0.4 * pass_s) * (1 - 1e-9)
    assert chunk == 1 or (chunk - 1) * step_s < MESSAGE_S / MESSAGE_OF_CHUNK


def test_a_message_must_save_more_than_it_costs() -> None:
    pacing = choose_pacing(4, 0, Measured(0.001, 0.010, 0.0))
    assert pacing.min_gain * 0.010 == MESSAGE_S
    assert expected_gain([0.5, 0.25], 0, pacing) > pacing.min_gain
    assert expected_gain([0.5, 0.25, 0.001], 2, pacing) < pacing.min_gain


def test_tokens_that_come_too_late_save_nothing() -> None:
    """Draft tokens for passes that end before the message with them arrives save no time.

    In this test three passes end before that, so only tokens for later passes count.
    """
    pacing = choose_pacing(4, 0, Measured(0.001, 0.010, 0.035))
    assert expected_gain([0.9, 0.8, 0.7], 0, pacing) == 0.0
    assert expected_gain([0.9, 0.8, 0.7, 0.6, 0.5], 0, pacing) == 0.6 + 0.5


@settings(max_examples=300, deadline=None)
@given(st.floats(0.05, 0.99), st.floats(1e-4, 0.02), st.floats(1e-3, 0.1))
def test_the_first_message_has_the_best_length(rate: float, step_s: float, round_s: float) -> None:
    """If each draft token is accepted with one probability, a proposal's first message has the fastest length.

    `rate` is this probability; a step of the draft takes `step_s`, and a pass of the target `round_s`.
    """
    pacing = choose_pacing(64, 0, Measured(step_s, round_s, 0.0))
    survivals = [rate ** (i + 1) for i in range(64)]
    stopped = next((n for n in range(1, 64) if is_first_message_complete(survivals[:n], pacing)), 64)

    def tokens_per_s(num_tokens: int) -> float:
        return (1.0 + sum(survivals[:num_tokens])) / (round_s + num_tokens * step_s)

    assert tokens_per_s(stopped) >= max(map(tokens_per_s, range(1, 65))) * (1 - 1e-9)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 5), SECONDS, SECONDS, SECONDS)
def test_branches_need_a_round_trip_to_save(limit: int, step_s: float, pass_s: float, round_trip_s: float) -> None:
    chosen = choose_branching(limit, Measured(step_s, pass_s, round_trip_s))
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
    near, far = (choose_branching(3, Measured(step_s, pass_s, rtt_s)) for rtt_s in sorted((one_s, other_s)))
    assert near.depth <= far.depth
    assert near.count <= far.count
