"""Comparison with an earlier commit: results of several runs of one checkout are joined into one result."""

from __future__ import annotations

from pathlib import Path

from benchmarks.since import joined


def test_several_runs_of_a_checkout_are_joined_into_one_result() -> None:
    turns = [
        {"conditions": {"Target model": "/here/models/target"}, "requests": [[{"run": run}], [{"run": -run}]]}
        for run in (1, 2)
    ]
    found = joined(turns, Path("/here"))
    assert found["requests"] == [[{"run": 1}, {"run": 2}], [{"run": -1}, {"run": -2}]], "cell by cell"
    assert found["conditions"] == {"Target model": "models/target"}, "the place of a checkout is no difference"
