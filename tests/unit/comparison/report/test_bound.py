"""The bound, against rounds simulated one by one."""

from __future__ import annotations

import random

import pytest

from inference.commit import Timings
from inference.comparison.plan.config import Contender, Topology
from inference.comparison.report import bound
from inference.comparison.report.bound import Costs
from inference.comparison.report.summary import Theory
from inference.comparison.run.record import Round
from inference.request import Schedule
from tests.support.samples import PASS_S, STEP_S, VERIFY_S, record

NUM_TOKENS = 40_000
COSTS = Costs(pass_s=PASS_S, verify_s=VERIFY_S, step_s=STEP_S)


def _simulated_round(rng: random.Random, alpha: float, gamma: int) -> Round:
    """Accept until the first rejection, then one token of the target's own."""
    num_accepted = next((i for i in range(gamma) if rng.random() >= alpha), gamma)
    return Round(0.0, num_accepted + 1, gamma, num_accepted, Timings())


def _simulate(alpha: float, gamma: int, round_s: float) -> tuple[list[Round], float]:
    """Rounds until there are enough tokens, and the tokens per second they give."""
    rng, rounds, num_tokens = random.Random(1), [], 0
    while num_tokens < NUM_TOKENS:
        rounds.append(_simulated_round(rng, alpha, gamma))
        num_tokens += rounds[-1].num_tokens
    return rounds, num_tokens / (len(rounds) * round_s)


@pytest.mark.parametrize("gamma", [1, 4, 10])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("rtt_s", [0.0, 0.03])
def test_distributed_bound_is_what_simulated_rounds_give(alpha: float, gamma: int, rtt_s: float) -> None:
    round_s = gamma * STEP_S + rtt_s + VERIFY_S
    _, simulated = _simulate(alpha, gamma, round_s)
    contender = Contender(Topology.DISTRIBUTED, "draft", gamma)
    theory = Theory(contender, COSTS, alpha, num_tokens=NUM_TOKENS, concurrency=1)
    assert theory.tokens_per_s(rtt_s, client_is_far=False) == pytest.approx(simulated, rel=0.02)


@pytest.mark.parametrize(
    "contender",
    [
        Contender(Topology.DISTRIBUTED, "draft", 4, Schedule.ASYNC),
        Contender(Topology.POOL, "draft", 4),
    ],
)
@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.0])
def test_bound_of_run_ahead_is_full_proposals_without_a_wait(contender: Contender, alpha: float) -> None:
    """Whatever the network: neither the draft's work nor the way is seen."""
    _, simulated = _simulate(alpha, 4, VERIFY_S)
    theory = Theory(contender, COSTS, alpha, num_tokens=NUM_TOKENS, concurrency=1)
    for rtt_s in (0.0, 0.5):
        assert theory.tokens_per_s(rtt_s, client_is_far=False) == pytest.approx(simulated, rel=0.02)


def test_network_costs_fused_and_target_nothing_but_the_first_token() -> None:
    for topology, gamma in ((Topology.FUSED, 4), (Topology.TARGET, None)):
        theory = Theory(Contender(topology, "draft", gamma), COSTS, 0.5, num_tokens=100, concurrency=1)
        near, far = (theory.tokens_per_s(0.05, client_is_far=is_far) for is_far in (False, True))
        assert 100 / far - 100 / near == pytest.approx(0.05)
        assert near == theory.tokens_per_s(0.0, client_is_far=True)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.9, 1.0])
def test_acceptance_probability_is_found_again(alpha: float) -> None:
    """Not the acceptance rate: draft tokens behind a rejection were never decided on."""
    rounds, _ = _simulate(alpha, 5, 1.0)
    assert bound.acceptance_probability(rounds) == pytest.approx(alpha, abs=0.015)


def test_no_draft_has_no_acceptance() -> None:
    assert bound.acceptance_probability([Round(0.0, 1, 0, 0, Timings())]) is None


def test_tokens_per_round_at_its_ends() -> None:
    assert bound.tokens_per_round(0.0, 5) == 1.0
    assert bound.tokens_per_round(1.0, 5) == 6.0
    assert bound.tokens_per_round(0.7, 0) == 1.0


def test_costs_are_read_from_the_timings() -> None:
    fused = record(Contender(Topology.FUSED, "draft", 3))
    costs = bound.measured_costs([fused], 3, alone=[record(Contender(Topology.TARGET))])
    assert (costs.pass_s, costs.verify_s, costs.step_s, costs.prompt_s) == (PASS_S, VERIFY_S, STEP_S, 0.0)


def test_costs_without_rounds_are_zero() -> None:
    assert bound.measured_costs([], 3) == Costs(0.0, 0.0)
