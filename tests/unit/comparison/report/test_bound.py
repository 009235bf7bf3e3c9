"""The computed highest speed: no schedule of drafting and verification with the same right draft tokens is faster."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specdec.comparison.plan.config import Contender, Topology
from specdec.comparison.plan.record import RequestRecord, Round
from specdec.comparison.report import bound
from specdec.comparison.report.bound import Costs, Hit, Hits, answer_s
from specdec.comparison.report.summary import Theory
from specdec.inference.commit import Counts, OwnDrafts, Timings
from specdec.inference.request import Schedule
from tests.support.samples import PASS_S, STEP_S, TOKENS, VERIFY_S, record

COSTS = Costs((0.020, 0.022, 0.024, 0.026), step_s=0.002)
ASYNC = Contender(Topology.DISTRIBUTED, "draft", 3, Schedule.ASYNC)


def some_hits(rng: random.Random, count: int, rate: float) -> Hits:
    return tuple(rng.choice((Hit.DRAFT, Hit.DRAFT, Hit.OWN)) if rng.random() < rate else Hit.NONE for _ in range(count))


def pass_length(hits: Hits, done: int, offered: int) -> int:
    """Return the number of tokens that a pass commits after `done` tokens, if it verifies `offered` draft tokens."""
    accepted = 0
    while accepted < offered and done + accepted < len(hits) - 1 and hits[done + accepted] is not Hit.NONE:
        accepted += 1
    return accepted + 1


def rounds_s(hits: Hits, costs: Costs, lengths: Sequence[int], rtt_s: float) -> float:
    """Return the seconds of an answer in simulated rounds, which draft `lengths[0]` tokens, then `lengths[1]`, ...

    After the last length the first one follows again.
    """
    now, done, number = 0.0, 0, 0
    while done < len(hits):
        offered = min(lengths[number % len(lengths)], len(hits) - done - 1)
        drafted = sum(hit is not Hit.OWN for hit in hits[done : done + offered])
        now += drafted * costs.step_s + (rtt_s if drafted else 0.0) + costs.passes_s[offered]
        done += pass_length(hits, done, offered)
        number += 1
    return now


def ahead_s(hits: Hits, costs: Costs, rng: random.Random, rtt_s: float) -> float:
    """Return the seconds of a simulated answer whose draft goes on drafting while the target verifies.

    The target verifies the draft tokens that have arrived, and at random waits for one more first.
    """
    now, done = 0.0, 0
    arrivals = arrivals_of(hits, 0, 0.0, costs.step_s)
    while done < len(hits):
        widest = min(len(costs.passes_s) - 1, len(hits) - done - 1)
        if rng.random() < 0.3 and widest:
            now = max(now, min(arrivals[done], now + rtt_s))
        offered = next((n for n in range(widest) if arrivals[done + n] > now), widest)
        now += costs.passes_s[offered]
        committed = done + pass_length(hits, done, offered)
        if Hit.NONE in hits[done:committed]:
            arrivals = arrivals_of(hits, committed, now + rtt_s, costs.step_s)
        done = committed
    return now


def arrivals_of(hits: Hits, start: int, known_s: float, step_s: float) -> list[float]:
    """Return, for each position, the second at which its draft token arrives, if drafting begins at `start`.

    Args:
        hits: whose proposal, if any, is right at each position.
        start: first position to draft for; those before it get `known_s`.
        known_s: the second at which drafting begins.
        step_s: seconds of drafting a token; a looked-up token takes none, and arrives at second -1.
    """
    arrivals, now = [known_s] * len(hits), known_s
    for position in range(start, len(hits)):
        now += step_s * (hits[position] is not Hit.OWN)
        arrivals[position] = now if hits[position] is not Hit.OWN else -1.0
    return arrivals


@pytest.mark.parametrize("rtt_s", [0.0, 0.03, 0.2])
@pytest.mark.parametrize("rate", [0.3, 0.8, 1.0])
def test_no_simulated_schedule_is_faster(rate: float, rtt_s: float) -> None:
    """No simulated schedule, in rounds of any lengths or with a draft running ahead, is faster than the computed bound.

    `rate` is the share of positions with a right draft token.

    Regression: the bound assumed equal and independent acceptance, and schedules with adaptive lengths were faster.
    """
    rng = random.Random(f"{rate} {rtt_s}")
    for _ in range(40):
        hits = some_hits(rng, 60, rate)
        lengths = [rng.randint(0, 3) for _ in range(7)]
        in_rounds = answer_s(hits, COSTS, rtt_s=rtt_s, runs_ahead=False)
        ahead = answer_s(hits, COSTS, rtt_s=rtt_s, runs_ahead=True)
        assert in_rounds <= rounds_s(hits, COSTS, lengths, rtt_s) + 1e-9
        assert ahead <= ahead_s(hits, COSTS, rng, rtt_s) + 1e-9


def fastest_s(hits: Hits, costs: Costs, rtt_s: float, done: int = 0) -> float:
    """Return the seconds of the fastest rounds for the tokens after the first `done` ones.

    They are found by trying every number of draft tokens in every round.
    """
    if done == len(hits):
        return 0.0
    times = []
    for offered in range(min(len(costs.passes_s), len(hits) - done)):
        drafted = sum(hit is not Hit.OWN for hit in hits[done : done + offered])
        now = drafted * costs.step_s + (rtt_s if drafted else 0.0) + costs.passes_s[offered]
        times.append(now + fastest_s(hits, costs, rtt_s, done + pass_length(hits, done, offered)))
    return min(times)


def test_the_bound_of_rounds_is_reached() -> None:
    rng = random.Random(3)
    for _ in range(20):
        hits, rtt_s = some_hits(rng, 9, 0.7), rng.choice([0.0, 0.005, 0.05])
        assert answer_s(hits, COSTS, rtt_s=rtt_s, runs_ahead=False) == pytest.approx(fastest_s(hits, COSTS, rtt_s))


def test_a_miss_costs_run_ahead_a_round_trip_and_a_step() -> None:
    """After a wrong draft token, a draft that runs ahead costs a round trip and a step, if that is the faster way.

    Otherwise the target goes on alone. The answer has two right draft tokens and a wrong one, twice: two passes and
    the gap between them.
    """
    hits = (Hit.DRAFT, Hit.DRAFT, Hit.NONE) * 2
    costs = Costs((1.0, 1.0, 1.0), step_s=0.01)
    assert answer_s(hits, costs, rtt_s=0.5, runs_ahead=True) == pytest.approx(0.02 + 1.0 + 0.5 + 0.02 + 1.0)
    assert answer_s(hits, costs, rtt_s=9.0, runs_ahead=True) == pytest.approx(0.02 + 1.0 + 3.0)  # the target alone


def test_looked_up_tokens_need_no_draft() -> None:
    costs = Costs((1.0, 1.0, 1.0), step_s=0.1)
    for runs_ahead in (False, True):
        assert answer_s((Hit.OWN, Hit.OWN, Hit.NONE), costs, rtt_s=9.0, runs_ahead=runs_ahead) == 1.0


def an_answer(*rounds: tuple[int, int, int, int, int]) -> RequestRecord:
    """Return an answer in rounds of (tokens, draft tokens, accepted, looked-up tokens, hits of alternative tokens)."""
    made = [
        Round(0.0, tokens, drafted, accepted, Timings(), Counts(num_branch_hits=hits), OwnDrafts(looked_up, accepted))
        if looked_up
        else Round(0.0, tokens, drafted, accepted, Timings(), Counts(num_branch_hits=hits))
        for tokens, drafted, accepted, looked_up, hits in rounds
    ]
    return RequestRecord(0, 0.0, 4, TOKENS[: sum(item.num_tokens for item in made)], tuple(made))


def test_hits_come_from_all_passes_that_tested_a_position() -> None:
    one = an_answer((2, 3, 1, 0, 0), (1, 0, 0, 0, 0), (2, 1, 1, 1, 0), (1, 0, 0, 0, 0))
    other = an_answer((1, 0, 0, 0, 0), (2, 1, 1, 0, 0), (1, 3, 0, 0, 1), (2, 0, 0, 0, 0))
    by_draft = bound.hits_of([one, other], has_draft=True).values()
    assert list(by_draft) == [(Hit.DRAFT, Hit.DRAFT, Hit.DRAFT, Hit.OWN, Hit.DRAFT, Hit.DRAFT)]
    assert list(bound.hits_of([one], has_draft=True).values()) == [
        (Hit.DRAFT, Hit.NONE, Hit.DRAFT, Hit.OWN, Hit.DRAFT, Hit.DRAFT)
    ]
    alone = an_answer((1, 0, 0, 0, 0), (2, 1, 1, 1, 0), (1, 2, 0, 2, 0))
    assert list(bound.hits_of([alone], has_draft=False).values()) == [(Hit.NONE, Hit.OWN, Hit.NONE, Hit.NONE)]


def test_answers_that_differ_have_sequences_of_their_own() -> None:
    one = an_answer((1, 1, 0, 0, 0))
    assert len(bound.hits_of([one, replace(one, token_ids=(7,))], has_draft=True)) == 2


def test_the_network_costs_targets_the_first_token_alone() -> None:
    hits = some_hits(random.Random(1), 40, 0.5)
    for topology, gamma in ((Topology.FUSED, 3), (Topology.TARGET, None)):
        theory = Theory(Contender(topology, "draft", gamma), COSTS, [hits], concurrency=1)
        near, far = (theory.tokens_per_s(0.05, client_is_far=is_far) for is_far in (False, True))
        assert 40 / far - 40 / near == pytest.approx(0.05)
        assert near == theory.tokens_per_s(0.0, client_is_far=True)


def test_the_bound_falls_with_the_round_trip_to_that_of_the_target_alone() -> None:
    hits = some_hits(random.Random(2), 400, 0.8)
    theory = Theory(ASYNC, COSTS, [tuple(min(hit, Hit.DRAFT) for hit in hits)], concurrency=2)
    rates = [theory.tokens_per_s(rtt_s, client_is_far=False) for rtt_s in (0.0, 0.03, 0.1, 0.5)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.5 * rates[-1]


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_acceptance_probability_is_found_again(alpha: float) -> None:
    """The estimated acceptance probability is right, though a rejection leaves the draft tokens after it untested.

    The share of all draft tokens that are accepted would be lower.
    """
    rng, rounds = random.Random(1), []
    for _ in range(8000):
        num_accepted = next((i for i in range(5) if rng.random() >= alpha), 5)
        rounds.append(Round(0.0, num_accepted + 1, 5, num_accepted, Timings()))
    assert bound.acceptance_probability(rounds) == pytest.approx(alpha, abs=0.015)
    assert bound.acceptance_probability([Round(0.0, 1, 0, 0, Timings())]) is None


def test_costs_are_read_from_the_timings() -> None:
    """Costs of passes are measured by number of draft tokens, numbers between are interpolated; 0 without passes."""
    fused = record(Contender(Topology.FUSED, "draft", 3))
    costs = bound.measured_costs([fused], 3, alone=[record(Contender(Topology.TARGET))])
    assert (costs.pass_s, costs.verify_s, costs.step_s, costs.prompt_s) == (PASS_S, VERIFY_S, STEP_S, 0.0)
    between = PASS_S + (VERIFY_S - PASS_S) / 3
    assert costs.passes_s[1] == pytest.approx(between)
    assert bound.measured_costs([], 3) == Costs((0.0,) * 4)


def test_a_draft_that_runs_ahead_says_its_step_time() -> None:
    """If a draft runs ahead (drafts during verification), the step time that it reports is in the costs.

    Regression: the computed highest speed took such a draft's steps to cost nothing.
    """
    timed = [Round(0.0, 3, 3, 2, Timings(compute_us=24_000, step_us=3_000))] * 5
    assert bound.measured_costs([RequestRecord(0, 0.0, 4, TOKENS, tuple(timed))], 3).step_s == 0.003


def test_a_wider_pass_is_never_taken_to_be_faster() -> None:
    widths = [
        Round(0.0, 1, drafted, 0, Timings(compute_us=us)) for drafted, us in ((0, 30_000), (1, 20_000), (2, 25_000))
    ]
    costs = bound.measured_costs([RequestRecord(0, 0.0, 4, TOKENS, (widths[0], *widths))], 2)
    assert costs.passes_s == pytest.approx((0.020, 0.020, 0.025))
