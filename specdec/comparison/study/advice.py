"""Advice from measurements: with which draft and topology to serve, and when that pays, in sentences with figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.comparison.plan.config import Contender, Topology
from specdec.comparison.plan.roles import MARGIN, TIE
from specdec.comparison.report.summary import Spread
from specdec.comparison.study.space import FACTORS, Conditions, Group, Space, way

_SIMPLEST = (Topology.TARGET, Topology.FUSED, Topology.DISTRIBUTED, Topology.POOL)


@dataclass(frozen=True, slots=True)
class Trial:
    """Measurement of one contender, which is a way to serve, under one set of conditions.

    Attributes:
        place: the conditions.
        speedup: speed-up over the target without a draft in the same run: median and range of the runs.
        tokens_per_s, alone_tokens_per_s: tokens/s of all clients together, with the contender and without a draft.
        ttft_s, alone_ttft_s: median time to the first token, with the contender and without a draft.
        acceptance_rate: share of accepted draft tokens; None if nothing was drafted.
    """

    place: Conditions
    contender: Contender
    speedup: Spread
    tokens_per_s: float
    alone_tokens_per_s: float
    ttft_s: float
    alone_ttft_s: float
    acceptance_rate: float | None = None

    @property
    def pays(self) -> bool:
        """Return whether the contender beats the target alone in every run, in the median by the factor `MARGIN`."""
        return self.speedup.median >= MARGIN and self.speedup.low > 1.0

    def __str__(self) -> str:
        low, high = self.speedup.low, self.speedup.high
        return f"{self.speedup.median:.2f} ({f'{low:.2f}-{high:.2f}' if low < high else 'one run'})"


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per hour in any currency.

    Attributes:
        target: price of the target's machine.
        draft: price of the machine that a draft worker has for itself; it is added for topologies with two machines.
    """

    target: float
    draft: float = 0.0

    def per_million_tokens(self, contender: Contender | None, tokens_per_s: float) -> float:
        """Return the price of a million output tokens.

        Args:
            contender: way to serve; None is the target alone.
            tokens_per_s: its tokens/s of all clients together.
        """
        is_split = contender is not None and contender.topology.is_split
        return (self.target + self.draft * is_split) / (tokens_per_s * 3600) * 1e6


class Evidence:
    """All trials of a study, and what follows from them.

    A trial is the measurement of one contender (a way to serve) under one set of conditions.

    Args:
        space: contenders and conditions of the study; the first value of each condition is the usual one.
        skipped: groups of contenders that were not measured, since the time was too short.
    """

    def __init__(self, space: Space, trials: Sequence[Trial], skipped: Sequence[Group] = ()) -> None:
        self.space = space
        self.trials = tuple(trials)
        self.skipped = tuple(skipped)

    def at(self, place: Conditions) -> list[Trial]:
        """Return the measurements under the conditions `place`, that with the largest median speed-up first."""
        return sorted((it for it in self.trials if it.place == place), key=lambda it: -it.speedup.median)

    def best(self, place: Conditions) -> Trial | None:
        """Return the measurement of the way to serve that is advised under the conditions `place`.

        None: the target alone is advised.
        """
        paying = [trial for trial in self.at(place) if trial.pays]
        near = [trial for trial in paying if trial.speedup.median >= TIE * paying[0].speedup.median]
        return min(near, key=_simplicity, default=None)

    @property
    def leader(self) -> Trial | None:
        """Measurement of the advised way to serve under the usual conditions, else of the fastest one under them.

        None if nothing was measured under them.
        """
        return self.best(self.space.usual) or next(iter(self.at(self.space.usual)), None)

    @property
    def leaders(self) -> list[Trial]:
        """Best measurement of each topology and schedule under the usual conditions, in order of speed-up."""
        best: dict[str, Trial] = {}
        for trial in self.at(self.space.usual):
            best.setdefault(way(trial.contender), trial)
        return list(best.values())

    def over(self, factor: str, contender: Contender) -> dict[float, Trial]:
        """Return a contender's measurements by the values of one condition, in ascending order, with all else as usual.

        Args:
            factor: name of the condition, or "gamma" for the number of draft tokens.
            contender: way to serve.
        """
        usual = self.space.usual
        found = {}
        for trial in self.trials:
            if factor == "gamma":
                if trial.place == usual and replace(trial.contender, gamma=contender.gamma) == contender:
                    found[float(trial.contender.gamma or 0)] = trial
            elif trial.contender == contender and _differs_in(trial.place, usual) <= {factor}:
                found[getattr(trial.place, factor)] = trial
        return dict(sorted(found.items()))


def _differs_in(place: Conditions, other: Conditions) -> set[str]:
    return {name for name in FACTORS if getattr(place, name) != getattr(other, name)}


def _simplicity(trial: Trial) -> tuple[int, float]:
    return _SIMPLEST.index(trial.contender.topology), -trial.speedup.median


def crossovers(trials: Mapping[float, Trial]) -> list[float]:
    """Return the values of a condition at which the speed-up crosses 1; empty if it does not.

    Args:
        trials: measurements by the values of the condition, ascending and above 0. A crossing between two of them is
            interpolated on a logarithmic scale.
    """
    found = []
    for (left, before), (right, after) in itertools.pairwise(trials.items()):
        above, below = before.speedup.median - 1.0, after.speedup.median - 1.0
        if above * below < 0:
            found.append(left * (right / left) ** (above / (above - below)))
    return found


def sentences(evidence: Evidence, prices: Prices | None) -> list[str]:
    """Return the advice in sentences, the most important ones first; costs are named only if there are prices."""
    leader = evidence.leader
    if leader is None:
        return ["Nothing was measured: the time is too short for the first group. Give it more, or ask for less."]
    parts = (_advised, _other_ways, _other_choices, _by_length, _by_load, _elsewhere, _losses)
    costs = _costs(evidence, leader, prices) if prices else ()
    return [*(sentence for part in parts for sentence in part(evidence, leader)), *costs, *_not_tried(evidence)]


def _advised(evidence: Evidence, leader: Trial) -> Iterator[str]:
    place, best = evidence.space.usual, evidence.best(evidence.space.usual)
    if best is None:
        yield (
            f"At {place}: serve the target alone. The best of what was tried, {leader.contender.label}, gives {leader} "
            "times its speed."
        )
        return
    yield (
        f"At {place}: serve with {best.contender.label}. It gives {best} times the speed of the target alone, "
        f"{best.tokens_per_s:.0f} tokens/s instead of {best.alone_tokens_per_s:.0f}; the first token comes after "
        f"{best.ttft_s * 1e3:.0f} ms instead of {best.alone_ttft_s * 1e3:.0f}."
    )


def _other_ways(evidence: Evidence, leader: Trial) -> Iterator[str]:
    others = [trial for trial in evidence.leaders if way(trial.contender) != way(leader.contender)]
    if others:
        yield f"Other ways there, each at its best: {_listed({trial.contender.label: trial for trial in others})}."


def _other_choices(evidence: Evidence, leader: Trial) -> Iterator[str]:
    same = [trial for trial in evidence.at(evidence.space.usual) if way(trial.contender) == way(leader.contender)]
    for name in ("draft", "gamma", "branches"):
        best: dict[str, Trial] = {}
        for trial in same:
            value = trial.contender.draft_name if name == "draft" else getattr(trial.contender, name)
            best.setdefault(f"{name} {value}", trial)
        if len(best) > 1:
            yield f"{way(leader.contender)}, by {name}, each at its best: {_listed(best)}."


def _by_length(evidence: Evidence, leader: Trial) -> Iterator[str]:
    trials = evidence.over("max_new_tokens", leader.contender)
    if len(trials) < 2:
        return
    paying = [length for length, trial in trials.items() if trial.pays]
    losing = [length for length in trials if length not in paying]
    if not paying:
        verdict = "pays at no output length that was tried"
    elif losing and max(losing) < min(paying):
        verdict = f"pays from {min(paying):g} output tokens on, not at {max(losing):g}"
    else:
        verdict = "pays at every output length that was tried" if not losing else "pays at some output lengths"
    yield f"{leader.contender.label} {verdict}: {_listed(trials)}."


def _by_load(evidence: Evidence, leader: Trial) -> Iterator[str]:
    """Yield a sentence on each way to serve that was measured at several loads: how its speed-up depends on the load.

    These are the best ways of each topology and schedule under the usual conditions.
    """
    for trial in evidence.leaders:
        trials = evidence.over("concurrency", trial.contender)
        if len(trials) < 2:
            continue
        first = next(iter(trials.values())).speedup.median
        crossed = crossovers(trials)
        where = f"{'loses' if first > 1 else 'pays'} from about {crossed[0]:.0f} in flight on" if crossed else ""
        where = where or ("pays at every load that was tried" if first > 1 else "loses at every load that was tried")
        yield f"With load, {trial.contender.label}, {where}; by requests in flight: {_listed(trials)}."


def _elsewhere(evidence: Evidence, leader: Trial) -> Iterator[str]:
    """Yield a sentence for each change of one usual condition with which another way to serve is the best."""
    advised = evidence.best(evidence.space.usual)
    for place in evidence.space.changed(1):
        best = evidence.best(place)
        if evidence.at(place) and (best and best.contender) != (advised and advised.contender):
            (factor,) = _differs_in(place, evidence.space.usual)
            what = "the target alone" if best is None else f"{best.contender.label}, {best}"
            yield f"At {place.factor(factor)}, all else as usual: {what}."


def _losses(evidence: Evidence, leader: Trial) -> Iterator[str]:
    lost = {f"{trial.contender.label} at {trial.place}": trial for trial in evidence.trials if trial.speedup.high < 1}
    worst = dict(sorted(lost.items(), key=lambda item: item[1].speedup.median)[:5])
    if worst:
        yield f"Slower than the target alone in {len(lost)} of {len(evidence.trials)} trials, worst: {_listed(worst)}."


def _costs(evidence: Evidence, leader: Trial, prices: Prices) -> Iterator[str]:
    for load, trial in evidence.over("concurrency", leader.contender).items():
        alone = prices.per_million_tokens(None, trial.alone_tokens_per_s)
        cost = prices.per_million_tokens(trial.contender, trial.tokens_per_s)
        yield f"A million tokens cost {cost:.2f} with {load:g} in flight, {alone:.2f} by the target alone."


def _not_tried(evidence: Evidence) -> Iterator[str]:
    tried = f"{len(evidence.trials)} of {evidence.space.num_trials} combinations were tried"
    skipped = f"for {len(evidence.skipped)} groups more the time was too short" if evidence.skipped else ""
    yield f"{tried}; {skipped or 'the search wanted no more'}."


def _listed(trials: Mapping[Any, Trial]) -> str:
    return ", ".join(f"{name} {trial}" for name, trial in trials.items())
