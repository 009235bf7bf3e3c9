"""The real scheduler, on a virtual clock, comes near the highest possible speed of docs/bound.md, never above it."""

from __future__ import annotations

import itertools
import random

import pytest

from specdec.comparison.report.bound import Costs, Hit, answer_s
from specdec.inference.config import ALWAYS
from tests.support.virtual import WINDOW, Outcome, Scenario, drawn, outcome_of

NUM_TOKENS = 64
STEP_S = 0.003
SHARE = 0.8
"""Least share of the highest possible speed that docs/bound.md promises."""


def cost(num_sessions: int, num_rows: int) -> float:
    return (20.0 + num_rows) / 1e3


def num_answers(outcome: Outcome) -> tuple[int, float]:
    """Return (number of complete answers, second at which the last of them ended)."""
    counts = itertools.accumulate(number for _, number in outcome.marks)
    ends = [at for (at, _), count in zip(outcome.marks, counts, strict=True) if count % NUM_TOKENS == 0]
    return len(ends), ends[-1]


def bound_s(number: int, alpha: float, rtt_s: float) -> float:
    """Return the least seconds that answer `number` of the scenario can take by docs/bound.md.

    Args:
        number: number of the answer; it decides which draft tokens are right.
        alpha: probability that a draft token is right.
        rtt_s: seconds of a round trip.
    """
    costs = Costs(tuple(cost(1, width) for width in range(1, WINDOW + 2)), step_s=1.1 * STEP_S)
    name = f"0-{number}"
    length = random.Random(f"0 {name}").randrange(8, 40)  # of the prompt, as the scenario's client draws it
    places = range(length, length + NUM_TOKENS)
    hits = tuple(Hit.DRAFT if drawn(name, place) < alpha else Hit.NONE for place in places)
    return cost(1, length) - cost(1, 1) + answer_s(hits, costs, rtt_s=rtt_s, runs_ahead=True)


@pytest.mark.parametrize("rtt_s", [0.0004, 0.03, 0.12])
@pytest.mark.parametrize("alpha", [0.5, 0.95])
def test_a_pool_is_near_the_bound_and_not_above_it(alpha: float, rtt_s: float) -> None:
    one_stream = Scenario(
        cost,
        lambda _: 1,
        alpha=alpha,
        step_s=STEP_S,
        link_s=rtt_s / 2,
        length=(NUM_TOKENS, NUM_TOKENS),
        noise=0.0,
        window=48,
        seconds=8.0,
    )
    count, seconds = num_answers(outcome_of(one_stream, ALWAYS))
    assert count >= 4
    share = sum(bound_s(number, alpha, rtt_s) for number in range(count)) / seconds
    assert SHARE <= share <= 1.0
