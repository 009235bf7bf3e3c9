"""The numbers of draft tokens that a pass verifies per session are chosen to give the most tokens per second."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.inference.scheduling.widths import choose_widths

SESSIONS = st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 1.0)), max_size=3)


STAIRS = st.lists(st.sampled_from([0.0, 0.0, 0.0, 1e-4, 1e-3, 0.02]), min_size=12, max_size=12)


def tokens_per_s(widths: tuple[int, ...], rates: list[float], seconds: Callable[[int], float]) -> float:
    """Return the expected tokens per second, by definition, of a pass.

    Args:
        widths: number of draft tokens of each session.
        rates: probability that a draft token is accepted, of each session.
        seconds: time of a pass by the number of draft tokens of all its sessions.
    """
    tokens = sum(sum(rate**k for k in range(width + 1)) for rate, width in zip(rates, widths, strict=True))
    return tokens / seconds(sum(widths))


def line(base_s: float, slope_s: float) -> Callable[[int], float]:
    return lambda number: base_s + slope_s * number


@settings(max_examples=300, deadline=None)
@given(SESSIONS, st.floats(1e-4, 0.1), STAIRS)
def test_no_other_widths_give_more_tokens_per_second(
    sessions: list[tuple[int, float]], base_s: float, steps: list[float]
) -> None:
    """The chosen numbers of draft tokens give as many tokens per second as the best of all possible numbers.

    Each of `sessions` is (draft tokens that are there, their acceptance); draft token i adds `steps[i]` to `base_s`.
    """

    def seconds(num_draft_tokens: int) -> float:
        return base_s + sum(steps[:num_draft_tokens])

    available, rates = [n for n, _ in sessions], [rate for _, rate in sessions]
    chosen = tuple(choose_widths(available, rates, seconds))
    every = itertools.product(*(range(n + 1) for n in available))
    best = max(tokens_per_s(widths, rates, seconds) for widths in every)
    assert tokens_per_s(chosen, rates, seconds) == pytest.approx(best, rel=1e-9)


def test_load_narrows_speculation() -> None:
    """The more sessions share a pass, the fewer draft tokens each gets."""
    widths = [choose_widths([8] * n, [0.7] * n, line(0.01, 0.0007))[0] for n in (1, 4, 16, 64)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]
