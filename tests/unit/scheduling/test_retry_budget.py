"""The budget of retries of a failed request: those that succeed cost nothing; the rate of failing ones is limited."""

from __future__ import annotations

from specdec.inference.scheduling.retry_budget import PER_S, SIZE, RetryBudget


def test_resumes_that_fail_are_so_many_a_second() -> None:
    budget = RetryBudget()
    taken = sum(budget.take(1000.0 + step / 100) for step in range(1000))
    assert taken == SIZE + PER_S * 10 - 1


def test_resumes_that_succeed_cost_nothing() -> None:
    budget = RetryBudget()
    for _ in range(10 * SIZE):
        assert budget.take(5.0)
        budget.give_back()


def test_the_retry_budget_refills_to_its_size() -> None:
    budget = RetryBudget()
    while budget.take(5.0):
        pass
    assert budget.take(5.0 + 1 / PER_S)
    assert not budget.take(5.0 + 1 / PER_S)
    assert sum(budget.take(1e6) for _ in range(10 * SIZE)) == SIZE


def test_half_may_be_left_to_others() -> None:
    budget = RetryBudget()
    assert sum(budget.take(5.0, spare=SIZE / 2) for _ in range(10 * SIZE)) == SIZE / 2
    assert sum(budget.take(5.0) for _ in range(10 * SIZE)) == SIZE / 2
