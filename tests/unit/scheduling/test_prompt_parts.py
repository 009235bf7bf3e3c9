"""Number of prompt tokens that a pass reads while other sessions decode in the same pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.scheduling.prompt_parts import (
    MAX_PART_TOKENS,
    SHORT_PART_TOKENS,
    STEP_TOKENS,
    USUAL_PART_TOKENS,
    PromptParts,
)

seconds = st.floats(1e-6, 1e3)


@given(share=st.floats(0.1, 1000), parts=st.lists(st.tuples(st.integers(1, 512), seconds), max_size=9), pass_s=seconds)
def test_room_is_within_its_limits(share: float, parts: list[tuple[int, float]], pass_s: float) -> None:
    known = PromptParts(share)
    for num_tokens, taken in parts:
        known.record(num_tokens, taken)
    room = known.room(pass_s)
    assert SHORT_PART_TOKENS <= room <= MAX_PART_TOKENS
    assert room % STEP_TOKENS == 0


@given(share=st.floats(0.5, 8), pass_s=st.floats(1e-3, 0.2), token_s=st.floats(1e-5, 1e-2))
def test_parts_take_the_share_of_a_pass(share: float, pass_s: float, token_s: float) -> None:
    """Reading prompt tokens takes `share` times a pass's own time, or less by at most STEP_TOKENS tokens."""
    known = PromptParts(share)
    for _ in range(5):
        known.record(64, 64 * token_s)
    room = known.room(pass_s)
    if USUAL_PART_TOKENS < room < MAX_PART_TOKENS:
        assert room * token_s <= share * pass_s * 1.000001 <= (room + STEP_TOKENS) * token_s * 1.000002


def test_costs_follow_the_latest_parts() -> None:
    """The latest costs, which grow with the position in a prompt, decide the number of prompt tokens in a pass."""
    known = PromptParts(2.0)
    rooms = []
    for token_s in (1e-4, 1e-3):
        for _ in range(20):
            known.record(64, 64 * token_s)
        rooms.append(known.room(0.01))
    assert rooms == [200, 16]


def test_unknown_times_limit_nothing() -> None:
    known = PromptParts(2.0)
    assert known.room(0.01) == MAX_PART_TOKENS
    known.record(64, 0.1)
    assert known.room(0.0) == MAX_PART_TOKENS


@pytest.mark.parametrize(("fixed_s", "usual"), [(0.02, USUAL_PART_TOKENS), (0.002, SHORT_PART_TOKENS)])
def test_the_shortest_parts_are_those_that_cost_little_more(fixed_s: float, usual: int) -> None:
    """A part of a prompt has the usual length if each part costs a high fixed time, and else the short length.

    `fixed_s` is that time in seconds, and `usual` the shortest length that follows from it.
    """
    known = PromptParts(0.1)
    known.record(MAX_PART_TOKENS, 1.0)
    rooms = []
    for number in range(60):
        rooms.append(known.room(0.006))
        known.record(rooms[-1], (fixed_s + rooms[-1] * 1e-3) * 1.005**number)
    assert set(rooms) == {SHORT_PART_TOKENS, USUAL_PART_TOKENS}
    assert rooms.count(usual) >= 50
