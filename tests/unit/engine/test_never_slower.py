"""Drafting with the default `--drafting measured` is never slower than no drafting, and keeps its gains.

Each scenario runs the real engine, pool, tree and batching on a virtual clock (tests/support/virtual.py), with given
times of passes and given other programs on the cores, so that figures are equal on every machine. A try is a short time
in which the server drafts again, after drafting was stopped, to measure whether drafting pays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from specdec.inference.config import ALWAYS, MEASURED, NEVER
from specdec.inference.scheduling.counterfactual import CREDIT_S, TRY_BUDGET
from tests.support.virtual import Outcome, Scenario, changing, drawn, outcome_of

WINDOW_S = 5
LONG_S = 24.0
"""Seconds of longer runs; of a shorter one, the first measurement of drafting would take too large a share."""


def cpu(num_sessions: int, num_rows: int) -> float:
    """Return the seconds of a pass on a CPU, which rise with the number of tokens (rows) in the pass."""
    return (4.2 + 0.30 * num_rows) / 1e3


def large_cpu(num_sessions: int, num_rows: int) -> float:
    return (9.0 + 0.62 * num_rows) / 1e3


def gpu(num_sessions: int, num_rows: int) -> float:
    """Return the seconds of a pass on an accelerator, which hardly rise with the number of tokens (rows)."""
    return (4.8 + 0.16 * num_sessions + 0.016 * num_rows) / 1e3


def stepped_cpu(num_sessions: int, num_rows: int) -> float:
    """Return the measured seconds of a pass of the bundled target, in which the second token costs more than others."""
    return (3.6 + (num_rows > 1) * 0.5 + 0.3 * (num_rows - 1)) / 1e3


def always(number: float) -> Callable[[float], float]:
    return lambda _: number


def streams(number: int) -> Callable[[float], int]:
    return lambda _: number


def burst(now: float) -> int:
    """Return the number of clients at second `now`: 48 in every third second, else 2."""
    return 48 if now % 3 > 2 else 2


SHORT = (44, 52)
LOSING = {
    "one core, 4 streams": Scenario(cpu, streams(4), always(1.3), shares=True),
    "one core, not known": Scenario(cpu, streams(4), always(1.3)),
    "one core, short answers": Scenario(cpu, streams(4), always(1.3), shares=True, length=SHORT),
    "one core, 16 streams": Scenario(cpu, streams(16), always(0.9), alpha=0.55, shares=True),
    "one core, 64 streams": Scenario(large_cpu, streams(64), always(0.6), alpha=0.55, shares=True, seconds=LONG_S),
    "one core, 64 short answers": Scenario(
        large_cpu, streams(64), always(0.6), alpha=0.55, shares=True, length=SHORT, seconds=LONG_S
    ),
    "own core, 64 streams": Scenario(large_cpu, streams(64), alpha=0.55, seconds=LONG_S),
    "two workers": Scenario(cpu, streams(16), always(0.9), alpha=0.55, num_workers=2, shares=True),
    "1 to 6 streams": Scenario(cpu, lambda now: 1 + int(2 * now) % 6, always(1.2), shares=True, length=SHORT),
    "twice as slow from the middle on": Scenario(
        lambda n, rows: cpu(n, rows), streams(4), always(1.3), shares=True, slower=lambda now: 1 + (now > 6)
    ),
    "cold first passes": Scenario(cpu, streams(4), always(1.3), first_s=0.3, shares=True),
    "lookup on changing text": Scenario(cpu, streams(4), always(0.5), text=changing, shares=True),
    "a slow stop": Scenario(cpu, streams(4), always(1.3), stop_s=0.2, shares=True),
    "two sessions of an edge": Scenario(cpu, streams(2), always(1.3), is_private=True, shares=True),
    "an edge 50 ms away": Scenario(gpu, streams(2), always(2.0), link_s=0.025, is_private=True, shares=True),
    "bursts": Scenario(cpu, burst, always(0.8), alpha=0.7, shares=True, seconds=LONG_S),
}
GAINING = {
    "2 streams": Scenario(gpu, streams(2), alpha=0.75, step_s=0.0008),
    "8 streams": Scenario(cpu, streams(8), alpha=0.8),
    "10 ms away": Scenario(gpu, streams(4), alpha=0.75, step_s=0.0008, link_s=0.005),
    "50 ms away": Scenario(gpu, streams(4), alpha=0.93, step_s=0.0008, link_s=0.025, window=32),
    "an edge": Scenario(gpu, streams(2), alpha=0.75, step_s=0.0008, is_private=True),
    "an edge 50 ms away": Scenario(
        gpu, streams(2), alpha=0.93, step_s=0.0008, link_s=0.025, is_private=True, window=32
    ),
    "a slow stop": Scenario(gpu, streams(4), alpha=0.75, stop_s=0.2),
    "lookup on changing text": Scenario(cpu, streams(4), alpha=0.8, text=changing),
}
QUICK = {"one core, 4 streams", "two sessions of an edge", "2 streams"}


def cases(scenarios: dict[str, Scenario]) -> list[object]:
    """Return the names of scenarios as test parameters; all but QUICK ones run only before a release."""
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.release]) for name in scenarios]


@cache
def run(scenario: Scenario, mode: str | None) -> Outcome:
    return outcome_of(scenario, mode)


@pytest.mark.parametrize("name", cases(LOSING))
def test_a_loss_is_found_and_drafting_stops(name: str) -> None:
    plain, ours = run(LOSING[name], None), run(LOSING[name], MEASURED)
    assert ours.num_tokens() >= 0.97 * plain.num_tokens()
    for start in range(int(LOSING[name].seconds) - WINDOW_S + 1):
        assert ours.num_tokens(start, start + WINDOW_S) >= 0.9 * plain.num_tokens(start, start + WINDOW_S)


@pytest.mark.parametrize("name", cases(GAINING))
def test_a_gain_is_kept(name: str) -> None:
    today, ours = run(GAINING[name], ALWAYS), run(GAINING[name], MEASURED)
    assert ours.num_tokens() >= 0.97 * today.num_tokens()


@pytest.mark.release
def test_idle_time_earns_no_tries() -> None:
    """Tries (drafting again to see whether it pays) may cost a share of the server's working time, not of idle time.

    Regression: the share was one of all time, so a server with little work lost far more of its work.
    """
    scenario = Scenario(
        large_cpu, lambda now: 64 * (now % 20 < 4), always(0.6), alpha=0.55, shares=True, length=SHORT, seconds=60.0
    )
    plain, ours = run(scenario, None), run(scenario, MEASURED)
    assert ours.num_tokens() >= 0.97 * plain.num_tokens()


@pytest.mark.release
def test_drafting_comes_and_goes_with_a_neighbour() -> None:
    """Drafting stops while another program takes the cores, and goes on afterwards."""
    scenario = Scenario(cpu, streams(4), lambda now: 1.4 if 4 < now < 8 else 0.0, alpha=0.75)
    plain, today, ours = (run(scenario, mode) for mode in (None, ALWAYS, MEASURED))
    assert ours.num_tokens() > today.num_tokens()
    assert ours.num_tokens(4.0, 8.0) >= 0.9 * plain.num_tokens(4.0, 8.0)
    assert ours.num_tokens(10.0) >= 1.1 * plain.num_tokens(10.0)


def test_workers_compute_nothing_where_drafting_is_off() -> None:
    assert run(GAINING["2 streams"], NEVER).num_steps == 0
    assert run(LOSING["one core, 4 streams"], MEASURED).num_steps < 0.1 * 12.0 / 0.0012


def test_tries_lose_what_they_may() -> None:
    """The measured loss by tries (drafting again to see whether it pays) stays below 2 % of the time from 15 s on."""
    assert TRY_BUDGET * (15 + CREDIT_S) <= 0.02 * 15
    lost_s = run(LOSING["one core, 4 streams"], MEASURED).drafting.rule.lost_s
    assert 0 < lost_s < TRY_BUDGET * (12 + CREDIT_S)


def words(key: str) -> Callable[[int], int]:
    """Return a text (from position to token) of 20 words in random order; texts of other keys have the same words."""
    return lambda position: 50 + int(20 * drawn(key, position))


ANSWERS = Scenario(stepped_cpu, streams(1), text=words("text"), gamma=None, length=(120, 120), seconds=3.0)


def test_a_useless_prediction_costs_a_fiftieth_at_most() -> None:
    """Short answers are as fast with a prediction of another text as without one.

    Regression: the first pass verified 58 tokens of each prediction, which took a twentieth of the time of 120 tokens.
    """
    useless = replace(ANSWERS, predicted=words("other"))
    assert run(useless, None).num_tokens() >= 0.98 * run(ANSWERS, None).num_tokens()


def test_a_right_prediction_gains() -> None:
    right = replace(ANSWERS, predicted=ANSWERS.text)
    assert run(right, None).num_tokens() >= 6 * run(ANSWERS, None).num_tokens()


def test_requests_without_drafts_decide_nothing() -> None:
    """Requests with gamma 0, which have no drafts, do not make the target switch drafting off.

    Regression: passes of such requests beside an idle worker switched drafting off for requests that want it.
    """
    outcome = outcome_of(Scenario(cpu, streams(4), gamma=0, seconds=3.0), MEASURED)
    assert outcome.num_tokens() > 0
    assert outcome.drafting.num_switches == 0
