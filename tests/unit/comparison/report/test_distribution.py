"""Quantiles against known values, the knee against known curves."""

from __future__ import annotations

import numpy as np
import pytest

from comparison.report.plots import knee
from comparison.report.service import describe


def test_quantiles_of_a_hundred_and_one_values() -> None:
    found = describe([float(value) for value in reversed(range(101))])
    assert {name: found[name] for name in ("p25", "p50", "p75", "p90", "p95", "p99", "min", "max", "mean")} == {
        "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99, "min": 0, "max": 100, "mean": 50,
    }  # fmt: skip
    assert found["stddev"] == pytest.approx(29.3002, abs=1e-4)


def test_of_one_value_and_of_none() -> None:
    assert describe([2.0])["stddev"] == 0.0
    assert describe([]) == {}


def test_the_knee_is_where_the_queue_fills() -> None:
    """A closed loop: so many slots are served at once, whoever comes beside them waits."""
    loads = [1, 2, 4, 6, 8, 12, 16]
    assert knee(loads, [max(1.0, load / 6) for load in loads]) == loads.index(6)


def test_the_knee_of_an_open_queue() -> None:
    """One server without a rhythm (M/M/1): time in the system is 1 / (1 - load)."""
    loads = np.linspace(0.0, 0.95, 20)
    index = knee(list(loads), list(1 / (1 - loads)))
    assert index is not None
    assert 0.7 <= loads[index] <= 0.85  # the chord's slope is met at 1 - sqrt(1 - 0.95)


@pytest.mark.parametrize("latencies", [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [1.0, 9.0]])
def test_what_has_no_knee(latencies: list[float]) -> None:
    assert knee(list(range(len(latencies))), latencies) is None
