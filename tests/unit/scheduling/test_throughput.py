"""The rule behind all decisions on draft tokens: choose what gives the most expected tokens per second."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.scheduling.throughput import fastest

PLANS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


@given(PLANS)
def test_no_plan_is_faster_and_no_later_one_as_fast(plans: list[tuple[int, int]]) -> None:
    rates = [Fraction(tokens, seconds) for tokens, seconds in plans]
    best = fastest(plans)
    assert rates[best] == max(rates)
    assert max(rates) not in rates[best + 1 :]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_the_last_plan_is_taken_while_no_time_is_known(tokens: list[int]) -> None:
    assert fastest((number, 0.0) for number in tokens) == len(tokens) - 1
