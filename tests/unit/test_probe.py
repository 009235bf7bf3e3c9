"""The prober of `make hostile` measures right how long threads waited for a CPU core."""

from __future__ import annotations

import pytest

from tests.suites.hostile.probe import waited_between


def test_the_worst_of_the_threads_counts() -> None:
    assert waited_between({1: 5.0, 2: 7.0, 3: 7.0}, {1: 5.5, 2: 7.1, 3: 7.25}, first=1) == pytest.approx(0.75)


def test_threads_come_and_go() -> None:
    """A server's waiting time is counted right when threads have begun or ended.

    Regression: if a thread had begun or ended, the waits of all others counted as the server's time.
    """
    assert waited_between({1: 5.0, 2: 7.0}, {1: 5.0, 2: 7.25, 4: 0.1}, first=1) == pytest.approx(0.25)
    assert waited_between({1: 5.0, 2: 7.0}, {1: 5.0, 4: 0.125}, first=1) == pytest.approx(0.125)
    assert waited_between({1: 5.0, 2: 7.0}, {1: 5.5}, first=1) == pytest.approx(0.5)
