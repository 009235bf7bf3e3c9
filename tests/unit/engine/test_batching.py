"""The choice of the sessions and draft tokens of a pass, without an engine."""

from __future__ import annotations

import pytest

from specdec.inference.engine.batching import Batching
from specdec.inference.engine.target_session import TargetSession
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.model.slots import Windows
from specdec.inference.request import GenerationRequest, SamplingParams, Schedule
from specdec.inference.speculation.tree import Branch

PASS_S = 10.0
"""Seconds of a pass: so many that the time of the test itself, which counts as waiting too, does not matter."""


def batching(row_s: float = 0.0) -> Batching:
    """Return a Batching that has recorded passes over one session, each of PASS_S + `row_s` seconds."""
    found = Batching(prompt_share=1.0, chunk_tokens=0)
    turn = Turn(0, 2, (5, 6, 7), SamplingParams())
    for _ in range(3):
        found.record([turn], [Verdict((8,), 0, 0)], PASS_S + row_s)
    return found


def helped(num_left: int, *, slot: int = 0) -> TargetSession:
    """Return a session that lacks `num_left` tokens; its draft worker sends four tokens 0.2 s after each commit."""
    session = TargetSession(GenerationRequest((5, 6, 7), max_new_tokens=num_left), max_length=60, gamma=4)
    session.follow(Schedule.ASYNC)
    session.enter(slot, 2)
    for started in (0.0, 1.0):
        session.sources.arrivals.proposed(started + 0.2, 4)
        session.sources.arrivals.committed(started + 0.9, all_accepted=False)
    return session


def waits(choice: Batching, *sessions: TargetSession) -> bool:
    return choice.wait_s(choice.turns(sessions), 1.95) > 0


def reading(slot: int, num_tokens: int) -> TargetSession:
    """Return a session with a prompt of `num_tokens` tokens, none of which has been read."""
    session = TargetSession(GenerationRequest((5,) * num_tokens), max_length=60, gamma=4)
    session.enter(slot, 0)
    return session


def decoding(slot: int) -> TargetSession:
    session = TargetSession(GenerationRequest((5, 6, 7)), max_length=60, gamma=4)
    session.enter(slot, 2)
    return session


@pytest.mark.parametrize("num_draft_tokens", [0, 8])
def test_a_burst_of_prompts_is_read_as_fast_as_its_share_allows(num_draft_tokens: int) -> None:
    """Prompts get their share of a pass even if no pass over as many sessions was ever measured without prompts.

    Each decoding session has `num_draft_tokens` draft tokens in the measured passes.

    Regression: such a pass was assumed to take as long as one over a single session, and the rest counted as the cost
    of its prompt tokens. So prompts seemed five times as costly, each pass read 16 tokens of them, and a burst of
    requests took long to be read.
    """
    choice = batching(row_s=0.5)
    choice.record([Turn(0, 0, (5,) * 40, SamplingParams())], [Verdict((8,), 0, 0)], 0.5 * 40)
    for num_decoding in (20, 30, 40, 40, 40, 40):
        work = [Turn(slot, 2, (5, 6, 7), SamplingParams()) for slot in range(num_decoding)]
        work.append(Turn(60, 0, (5,) * 16, SamplingParams()))
        drafted = [Verdict((8,), num_draft_tokens, 0)] * num_decoding
        seconds = PASS_S + 0.5 * num_decoding * (1 + num_draft_tokens) + 0.5 * 16
        choice.record(work, [*drafted, Verdict((8,), 0, 0)], seconds)
    turns = choice.turns([*map(decoding, range(40)), *(reading(slot, 20) for slot in range(40, 64))])
    num_read = sum(turn.num_unread for _, turn in turns) - 40
    whole = (PASS_S + 0.5 * 40 * (1 + num_draft_tokens)) / 0.5  # as many as take as long as the pass
    assert 0.7 * min(256, whole) <= num_read <= 1.1 * whole


@pytest.mark.parametrize(("num_left", "expected"), [(1, False), (2, True)])
def test_no_wait_for_tokens_that_find_no_room(num_left: int, expected: bool) -> None:
    """The target does not wait for draft tokens that an answer has too few tokens left to use.

    Regression: before the last token of an answer, the target waited for draft tokens that it could not use.
    """
    assert waits(batching(), helped(num_left)) == expected


def test_a_session_that_needs_no_draft_takes_the_others_along() -> None:
    alone = TargetSession(GenerationRequest((5, 6, 7), max_new_tokens=9), max_length=60, gamma=4)
    alone.enter(1, 2)
    assert waits(batching(), helped(9), helped(9, slot=2))
    assert not waits(batching(), helped(9), alone)
    assert not waits(batching())


@pytest.mark.parametrize(("seconds", "expected"), [(1.5 * PASS_S, Schedule.ASYNC), (2.5 * PASS_S, Schedule.SYNC)])
def test_rounds_pay_where_sessions_make_passes_long(seconds: float, expected: Schedule) -> None:
    choice, crowd = batching(), [Turn(slot, 2, (5, 6, 7), SamplingParams()) for slot in range(16)]
    assert choice.schedule(16) is Schedule.ASYNC
    for _ in range(3):
        choice.record(crowd, [Verdict((8,), 0, 0)] * 16, seconds)
    assert (choice.schedule(1), choice.schedule(16)) == (Schedule.ASYNC, expected)


def drafted(end: int, num_tokens: int, *, gamma: int = 8, schedule: Schedule | None = Schedule.ASYNC) -> TargetSession:
    """Return a decoding session with `end` committed tokens, to which its draft worker has sent `num_tokens` more.

    If `schedule` is None, it has no draft worker, and gets no tokens.
    """
    session = TargetSession(GenerationRequest(tuple(range(5, 5 + end)), max_new_tokens=40), max_length=99, gamma=gamma)
    session.enter(0, end - 1)
    if schedule is not None:
        session.follow(schedule)
        session.propose([Branch(None, end, tuple(range(num_tokens)))])
    return session


def proposed(windows: Windows | None, *sessions: TargetSession) -> list[tuple[int, int]]:
    """Return (number of draft tokens, gamma) of each session in the next pass."""
    choice = Batching(1.0, 0, windows)
    return [(len(turn.proposal), turn.gamma) for _, turn in choice.narrowed(choice.turns(sessions))]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [(None, [(5, 8), (5, 8)]), (Windows(16, 2), [(3, 3), (5, 5)]), (Windows(16, 3), [(5, 8), (5, 5)])],
)
def test_drafts_end_with_a_window_where_a_further_one_takes_a_further_pass(
    windows: Windows | None, expected: list[tuple[int, int]]
) -> None:
    assert proposed(windows, drafted(13, 5), drafted(11, 5)) == expected


def test_a_draft_of_ones_own_has_room_up_to_the_window() -> None:
    alone = [drafted(end, 0, schedule=None) for end in (9, 15, 16, 17)]
    assert [proposed(Windows(16, 1), session)[0][1] for session in alone] == [7, 1, 0, 8]


def test_rounds_are_verified_whole() -> None:
    assert proposed(Windows(16, 1), drafted(15, 5, schedule=Schedule.SYNC))[0][0] == 5
