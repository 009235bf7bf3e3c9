"""Comparisons of runs with a draft and without it: the order of the runs, and the text about their figures."""

from __future__ import annotations

import pytest

from specdec.inference.workers.completing.results import NUM_PAIRS, Comparison, Result
from tests.support.samples import BUSY, QUIET


class Runs:
    """Stand-in for the function that runs a prompt: records, run by run, whether it had a draft.

    Runs without a draft take the seconds `alone_s`, in order, and runs with one the seconds `drafted_s`.
    """

    def __init__(self, alone_s: list[float], drafted_s: list[float]) -> None:
        self.drafted: list[bool] = []
        self._left = {False: alone_s, True: drafted_s}

    async def __call__(self, is_drafted: bool) -> Result:
        self.drafted.append(is_drafted)
        result = Result("x", token_ids=[1])
        result.stats.arrivals.append((result.stats.started + self._left[is_drafted].pop(0), 1))
        return result


async def test_runs_alternate_so_that_none_is_always_first() -> None:
    """A comparison runs the prompt alternately without a draft and with it: alone, drafted, drafted, alone.

    Regression: `LLM.compare` ran each once, and `specdec demo` always began with the draft. So the first kind had a
    server that was not warm, or a machine busy with the start of another program.
    """
    runs = Runs([4.0] * NUM_PAIRS, [2.0] * NUM_PAIRS)
    comparison = await Comparison.of(runs)
    assert runs.drafted == [False, True, True, False] * (NUM_PAIRS // 2)
    assert comparison.speed_ups == pytest.approx([2.0] * NUM_PAIRS)
    assert "2.0 times as fast, the same tokens" in repr(comparison)


async def test_a_comparison_gives_its_range_and_says_that_the_machine_was_busy() -> None:
    comparison = await Comparison.of(Runs([2.0, 3.0, 4.0, 5.0], [1.0] * 4))
    comparison.load = QUIET
    assert repr(comparison).startswith("Comparison(2.0 to 5.0 times as fast, the same tokens: ")
    assert comparison.speed_up == pytest.approx(3.5)
    comparison.load = BUSY
    for shown in (repr(comparison), comparison._repr_html_()):
        assert "The machine was busy: " in shown
        assert str(BUSY) in shown
