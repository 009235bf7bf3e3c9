"""The bound on the speed of each topology, compared with rounds that are simulated one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from specdec.comparison.plan.config import Contender, Topology
from specdec.comparison.plan.record import Round
from specdec.comparison.report import bound
from specdec.comparison.report.bound import Costs
from specdec.comparison.report.summary import Theory
from specdec.inference.commit import Timings
from specdec.inference.request import Schedule
from tests.support.samples import PASS_S, STEP_S, VERIFY_S, record

NUM_TOKENS = 40_000
COSTS = Costs(pass_s=PASS_S, verify_s=VERIFY_S, step_s=STEP_S)


def _simulated_round(rng: random.Random, alpha: float, gamma: int) -> Round:
    """Draw one round: draft tokens are accepted up to the first rejection, and one token of the target is added."""
    num_accepted = next((i for i in range(gamma) if rng.random() >= alpha), gamma)
    return Round(0.0, num_accepted + 1, gamma, num_accepted, Timings())


def _simulate(alpha: float, gamma: int, round_s: float) -> tuple[list[Round], float]:
    """Draw rounds up to NUM_TOKENS tokens; return the rounds, and tokens per second if each takes `round_s`."""
    rng, rounds, num_tokens = random.Random(1), [], 0
    while num_tokens < NUM_TOKENS:
        rounds.append(_simulated_round(rng, alpha, gamma))
        num_tokens += rounds[-1].num_tokens
    return rounds, num_tokens / (len(rounds) * round_s)


@pytest.mark.parametrize("gamma", [1, 10])
@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0])
def test_distributed_bound_is_what_simulated_rounds_give(alpha: float, gamma: int) -> None:
    rtt_s = 0.03
    round_s = gamma * STEP_S + rtt_s + VERIFY_S
    _, simulated = _simulate(alpha, gamma, round_s)
    contender = Contender(Topology.DISTRIBUTED, "draft", gamma)
    theory = Theory(contender, COSTS, alpha, num_tokens=NUM_TOKENS, concurrency=1)
    assert theory.at_length(gamma, rtt_s, client_is_far=False) == pytest.approx(simulated, rel=0.02)
    assert theory.tokens_per_s(rtt_s, client_is_far=False) >= 0.98 * simulated


RUN_AHEAD = (Contender(Topology.DISTRIBUTED, "draft", 4, Schedule.ASYNC), Contender(Topology.POOL, "draft", 4))


@pytest.mark.parametrize("contender", RUN_AHEAD)
def test_run_ahead_without_surprise_is_the_first_way(contender: Contender) -> None:
    theory = Theory(contender, COSTS, 1.0, num_tokens=100, concurrency=1)
    near, far = (100 / theory.tokens_per_s(rtt_s, client_is_far=False) for rtt_s in (0.0, 0.5))
    assert near == pytest.approx(100 / 5 * VERIFY_S)
    opens = contender.topology is Topology.DISTRIBUTED
    assert far - near == pytest.approx(0.5 if opens else 0.0)


@pytest.mark.parametrize("contender", RUN_AHEAD)
def test_surprises_cost_run_ahead_a_round_trip(contender: Contender) -> None:
    """In the bound for run-ahead, each rejection costs a round trip.

    Regression: the bound did not depend on the round trip, as if the draft learned of a rejection at once.
    """
    theory = Theory(contender, COSTS, 0.8, num_tokens=200, concurrency=1)
    rates = [theory.tokens_per_s(rtt_s, client_is_far=False) for rtt_s in (0.0, 0.03, 0.1, 0.5)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.5 * rates[-1]
    far = Theory(contender, COSTS, 0.8, num_tokens=1e6, concurrency=1).tokens_per_s(100.0, client_is_far=False)
    assert far == pytest.approx(1 / PASS_S, rel=0.01)  # the target alone


@dataclass
class Simulation:
    """Simulation, event by event, of a target and a draft that runs ahead without limit; times in seconds.

    For each position it is drawn once whether the draft is right. If no proposal has arrived, the target waits if
    `waits` is set, and otherwise decodes by itself.
    """

    costs: Costs
    alpha: float
    gamma: int
    rtt_s: float
    waits: bool
    rng: random.Random

    def run(self, num_tokens: int) -> float:
        """Return the seconds from the request's start at the draft to the arrival of its last token at the draft."""
        now, done = self.rtt_s / 2, 0
        end, arrival = self._foreseen(0, -self.rtt_s / 2)  # drafted while the session is opened
        while done < num_tokens:
            arrived = self._arrived(arrival, done, now)
            if not arrived and self.waits:
                now = arrival(done)
                arrived = self._arrived(arrival, done, now)
            num_right = min(arrived, end - done)
            committed = done + num_right + 1
            now += self.costs.verify_s if arrived else self.costs.pass_s
            if committed > end:  # the token at `end` was the target's own, and another than the draft's
                is_hit = arrived > 0 and self.rng.random() < self.costs.foreseen
                end, arrival = self._foreseen(committed, -1e9 if is_hit else now)
            done = committed
        return now + self.rtt_s / 2

    def _arrived(self, arrival: Callable[[int], float], done: int, now: float) -> int:
        """Return how many tokens of the proposal (gamma at most) have reached the target by `now`."""
        return next((n for n in range(self.gamma) if arrival(done + n) > now), self.gamma)

    def _foreseen(self, start: int, known_s: float) -> tuple[int, Callable[[int], float]]:
        """Draft from position `start` on; return the first wrong position, and when each token reaches the target."""
        end = start
        while self.rng.random() < self.alpha and end < start + 10_000:
            end += 1
        return end, lambda position: known_s + self.rtt_s + (position - start + 1) * self.costs.step_s


@pytest.mark.parametrize("seed", range(8))
def test_run_ahead_is_never_simulated_above_its_bound(seed: int) -> None:
    """A simulated draft that runs ahead is never faster than the bound, and not far below it."""
    rng = random.Random(seed)
    costs = Costs(0.02, 0.02 + rng.random() * 0.01, rng.choice([0.0, 0.001, 0.004]), foreseen=rng.choice([0.0, 0.5]))
    alpha, gamma = rng.uniform(0.2, 0.97), rng.randint(1, 12)
    rtt_s, num_tokens = rng.choice([0.0, 0.01, 0.05, 0.2]), rng.choice([16, 128, 1024])
    waits = rng.random() < 0.5
    simulation = Simulation(costs, alpha, gamma, rtt_s, waits, rng)
    num_requests = 16_000 // num_tokens
    seconds = sum(simulation.run(num_tokens) for _ in range(num_requests)) / num_requests
    contender = Contender(Topology.DISTRIBUTED, "draft", gamma, Schedule.ASYNC)
    theory = Theory(contender, costs, alpha, num_tokens=num_tokens, concurrency=1)
    bound_s = num_tokens / theory.tokens_per_s(rtt_s, client_is_far=False)
    assert bound_s < 1.02 * seconds
    assert waits or bound_s > 0.4 * seconds


def test_network_costs_targets_the_first_token_alone() -> None:
    for topology, gamma in ((Topology.FUSED, 4), (Topology.TARGET, None)):
        theory = Theory(Contender(topology, "draft", gamma), COSTS, 0.5, num_tokens=100, concurrency=1)
        near, far = (theory.tokens_per_s(0.05, client_is_far=is_far) for is_far in (False, True))
        assert 100 / far - 100 / near == pytest.approx(0.05)
        assert near == theory.tokens_per_s(0.0, client_is_far=True)


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_acceptance_probability_is_found_again(alpha: float) -> None:
    """The estimate from simulated rounds is the acceptance probability with which they were drawn.

    It is not the rate of accepted tokens, since tokens after a rejection were never decided on.
    """
    rounds, _ = _simulate(alpha, 5, 1.0)
    assert bound.acceptance_probability(rounds) == pytest.approx(alpha, abs=0.015)


def test_costs_are_read_from_the_timings() -> None:
    """Costs of passes and draft steps are computed from the timings of rounds; without any they are 0."""
    fused = record(Contender(Topology.FUSED, "draft", 3))
    costs = bound.measured_costs([fused], 3, alone=[record(Contender(Topology.TARGET))])
    assert (costs.pass_s, costs.verify_s, costs.step_s, costs.prompt_s) == (PASS_S, VERIFY_S, STEP_S, 0.0)
    assert bound.measured_costs([], 3) == Costs(0.0, 0.0)
    assert bound.acceptance_probability([Round(0.0, 1, 0, 0, Timings())]) is None
    assert [bound.tokens_per_round(*at) for at in ((0.0, 5), (1.0, 5), (0.7, 0))] == [1.0, 6.0, 1.0]
