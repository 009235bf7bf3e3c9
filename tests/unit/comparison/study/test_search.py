"""A study's search, over simulated servers whose speed follows a formula, finds the known best within its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from specdec.comparison.plan.config import LOOKUP, Contender, Topology
from specdec.comparison.report.summary import Spread
from specdec.comparison.study.advice import Evidence, Trial
from specdec.comparison.study.search import Budget, Speeds, conduct
from specdec.comparison.study.space import Conditions, Group, Space
from specdec.inference.request import Schedule

GAMMAS = (8, 4, 2, 16)
DRAFTS = ("small", "large", "ngram")
GROUP_S = 1.0

Speedup = Callable[[Conditions, Contender], float]


def space(**conditions: tuple[float, ...]) -> Space:
    ways = ((Topology.FUSED, None, None), (Topology.DISTRIBUTED, Schedule.SYNC, None), (Topology.POOL, None, 3))
    contenders = [
        Contender(topology, draft, gamma, schedule, branches)
        for topology, schedule, branches in ways
        for draft in DRAFTS
        for gamma in GAMMAS
    ]
    usual: dict[str, tuple[object, ...]] = {
        "kind": ("prose",),
        "rtt_ms": (10.0,),
        "concurrency": (1,),
        "max_new_tokens": (64,),
        "temperature": (0.0,),
    }
    return Space((Contender(Topology.TARGET, LOOKUP, 16), *contenders), {**usual, **conditions})


def studied(speedup: Speedup, budget_s: float = 1e9, **conditions: tuple[float, ...]) -> Evidence:
    """Search on a simulated clock, with `GROUP_S` seconds for each group of measurements; return all that was found.

    Args:
        speedup: what a measurement gives, by conditions and contender.
        budget_s: seconds of the search.
        conditions: values to search, by name of a condition; others keep their usual value.
    """
    now, trials = [0.0], list[Trial]()
    searched = space(**conditions)

    async def measure(group: Group) -> Speeds:
        now[0] += GROUP_S
        found = {contender: speedup(group.place, contender) for contender in group.contenders}
        trials.extend(trial(group.place, contender, value) for contender, value in found.items())
        return found

    skipped = asyncio.run(conduct(searched, measure, Budget(budget_s, lambda: now[0])))
    return Evidence(searched, trials, skipped)


def trial(place: Conditions, contender: Contender, speedup: float) -> Trial:
    return Trial(place, contender, Spread(speedup, speedup, speedup), 40 * speedup, 40.0, 0.1, 0.1)


def rounds(place: Conditions, contender: Contender) -> float:
    """Return the speed-up of drafting in rounds by Leviathan's formula, with target passes of 25 ms."""
    alpha, step_s = {"small": (0.7, 0.001), "large": (0.85, 0.012), "ngram": (0.3, 0.0), LOOKUP: (0.1, 0.0)}[
        contender.draft or ""
    ]
    gamma = contender.gamma or 0
    link_s = place.rtt_ms / 1e3 if contender.topology.is_split else 0.0
    tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    busy = 1 + 0.02 * gamma * place.concurrency  # a pass of many requests pays for its width
    return tokens * 0.025 / (gamma * step_s + link_s + 0.025 * busy)


def everywhere(speedup: Speedup, searched: Space) -> float:
    return max(speedup(searched.usual, contender) for contender in searched.contenders)


@pytest.mark.parametrize("rtt_ms", [0.2, 10.0, 200.0])
@pytest.mark.parametrize("load", [1, 8])
def test_the_best_of_the_whole_grid_is_found(rtt_ms: float, load: int) -> None:
    evidence = studied(rounds, rtt_ms=(rtt_ms,), concurrency=(load,))
    assert evidence.at(evidence.space.usual)[0].speedup.median == everywhere(rounds, evidence.space)
    assert len(evidence.trials) < len(evidence.space.contenders)  # without trying everything


def test_a_way_lost_at_usual_length_is_retried() -> None:
    """The search finds a topology that is slow with the usual gamma but the fastest of all with another gamma."""

    def speedup(place: Conditions, contender: Contender) -> float:
        if contender.topology is Topology.POOL:
            return 3.0 if contender.gamma == 2 else 0.5
        return 2.0 - 0.1 * (contender.gamma or 0) / 8

    evidence = studied(speedup)
    assert evidence.at(evidence.space.usual)[0].contender.topology is Topology.POOL


def test_every_condition_meets_every_way_once() -> None:
    evidence = studied(rounds, rtt_ms=(10.0, 0.2, 80.0), concurrency=(1, 8), max_new_tokens=(64, 16))
    tried = [(it.place, it.contender) for it in evidence.trials]
    assert len(tried) == len(set(tried))
    for place in evidence.space.changed(1):
        assert {it.contender.topology for it in evidence.at(place)} == set(Topology) - {Topology.ENDPOINT}
    assert not evidence.skipped


@pytest.mark.parametrize("budget_s", [0.5, 3.0, 6.0, 11.0])
def test_a_search_ends_in_time_and_names_conditions_left_out(budget_s: float) -> None:
    everything = studied(rounds, rtt_ms=(10.0, 0.2, 80.0), concurrency=(1, 8, 32))
    evidence = studied(rounds, budget_s, rtt_ms=(10.0, 0.2, 80.0), concurrency=(1, 8, 32))
    assert 0 < len(evidence.trials) < len(everything.trials)
    assert evidence.skipped
    measured = {(it.place, it.contender) for it in evidence.trials}
    assert not measured & {(group.place, it) for group in evidence.skipped for it in group.contenders}


def test_a_group_ends_with_the_budget() -> None:
    """A group of measurements ends when the study's time is over.

    Regression: `study --budget 3m` took 4 min 17 s, since a group that took longer than estimated ran to its
    end.
    """
    now, measured = [0.0], list[Group]()

    async def measure(group: Group) -> Speeds:
        measured.append(group)
        now[0] += 0.001
        if len(measured) == 2:
            now[0] += 1.0
            await asyncio.Event().wait()
        return dict.fromkeys(group.contenders, 1.0)

    skipped = asyncio.run(conduct(space(concurrency=(1, 8)), measure, Budget(0.05, lambda: now[0])))
    assert len(measured) == 2
    assert skipped[0] == measured[1]


def test_groups_of_most_value_are_measured_first() -> None:
    """If there is time for one group only, the search measures every topology once, under the usual conditions."""
    evidence = studied(rounds, 0.1, rtt_ms=(10.0, 80.0))
    assert [it.place for it in evidence.trials] == [evidence.space.usual] * 4
    assert len({it.contender.topology for it in evidence.trials}) == 4
