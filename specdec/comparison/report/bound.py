"""Upper bound of speed: that of the best possible schedule of the measured draft steps, target passes and round trips.

Draft and target sample with the same random numbers, so whether the draft's token at a position is the target's (a
hit) does not depend on the schedule: an answer has one sequence of hits, a property of the two models, the prompt and
the seed. A pass of the target that begins after `i` tokens of the answer can end after `j` only if tokens i .. j - 2
are hits; token j - 1 is the target's own. The recursion over the end of the last pass thus finds the fastest schedule
exactly, with proposals of any length up to gamma. With f(j) as the earliest time at which j tokens are final:

    rounds      f(j) = min over i of  f(i) + d t_d + R + t(j - i)                without drafted tokens no R
    run-ahead   f(j) = min over i of  max(f(i), g + d' t_d) + t(j - i)           without drafted tokens f(i) + t(j - i)

`d` counts the tokens of the pass that the draft model has to make, `d'` those since the latest miss; t(w) is the time
of a pass over w tokens, t_d that of a draft step, and R the round trip. In rounds, draft and target take turns. A draft
that runs ahead goes on while the target verifies, and learns of a miss when the target's token arrives: g is the time
of that commit plus R; before the first miss it is 0, since a session begins with proposals. Tokens of branches
(alternatives to the draft's best sequence) and tokens that the target looks up count as hits too; looked-up tokens take
no draft step and no round trip.

All times are measured, as tenth percentiles, since a bound has no disturbances. Positions that no pass has tested
count as hits. The time for handling requests, scheduling and tokenizing is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from specdec.comparison.plan.record import RequestRecord, Round


class Hit(IntEnum):
    """Source that has the target's token of a position before the target computes it, so that a pass can verify it."""

    NONE = 0
    DRAFT = 1  # the draft model, in its chain or in a branch
    OWN = 2  # the target itself, by lookup or because a grammar forces the token


Hits = tuple[Hit, ...]
"""For each token of an answer, its source before the target computes it."""
Answer = tuple[int, tuple[int, ...]]
"""Index of a prompt, and the tokens of its answer."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured times from which the upper bound of speed is computed, in seconds.

    Attributes:
        passes_s: times of target passes over 1, 2, 3, ... tokens, at least one; none is below that for fewer tokens.
        step_s: time in which the draft model makes one token; 0 if nothing is drafted.
        prompt_s: time by which the first pass, which reads the prompt, is longer than a pass over one token.
    """

    passes_s: tuple[float, ...]
    step_s: float = 0.0
    prompt_s: float = 0.0

    @property
    def pass_s(self) -> float:
        """Return the time of a pass over one token."""
        return self.passes_s[0]

    @property
    def verify_s(self) -> float:
        """Return the time of a pass over the most tokens, which verifies gamma draft tokens."""
        return self.passes_s[-1]


def answer_s(hits: Hits, costs: Costs, *, rtt_s: float, runs_ahead: bool) -> float:
    """Return the seconds of the fastest schedule of draft steps and passes for one answer, after its prompt is read.

    Args:
        hits: for each token of the answer, the source that has it before the target computes it.
        costs: measured times of draft steps and passes.
        rtt_s: round trip time between draft and target.
        runs_ahead: whether the draft goes on while the target verifies; otherwise they take turns.
    """
    best_s, known_s, drafted = [0.0], 0.0, [0]
    for end in range(1, len(hits) + 1):
        ends = []
        for begin in _begins(hits, end, len(costs.passes_s)):
            starts_s, num_drafted = best_s[begin], drafted[end - 1] - drafted[begin]
            if num_drafted and runs_ahead:
                starts_s = max(starts_s, known_s + drafted[end - 1] * costs.step_s)
            elif num_drafted:
                starts_s += num_drafted * costs.step_s + rtt_s
            ends.append(starts_s + costs.passes_s[end - begin - 1])
        best_s.append(min(ends))
        drafted.append(drafted[-1] + (hits[end - 1] is Hit.DRAFT))
        if runs_ahead and hits[end - 1] is Hit.NONE:
            known_s, drafted[end] = best_s[end] + rtt_s, 0
    return best_s[-1]


def _begins(hits: Hits, end: int, widest: int) -> range:
    """Return the numbers of tokens after which a pass may begin that makes the first `end` tokens of an answer final.

    The pass may have at most `widest` tokens, and all of them but the last must be hits.
    """
    first = end - 1
    while first > 0 and end - first < widest and hits[first - 1] is not Hit.NONE:
        first -= 1
    return range(first, end)


def hits_of(records: Iterable[RequestRecord], *, has_draft: bool) -> dict[Answer, Hits]:
    """Return for each answer which source has each of its tokens in advance, from all passes that tested its positions.

    Args:
        records: answers with one draft model, in any topology; or of the target alone.
        has_draft: True if a right draft token is assumed at each position that no pass has tested; False if none is.
    """
    found: dict[Answer, list[Hit | None]] = {}
    for record in records:
        num_tokens = sum(item.num_tokens for item in record.rounds)
        tested = found.setdefault((record.prompt_index, record.token_ids), [None] * num_tokens)
        start = 0
        for item in record.rounds:
            _test(tested, start, item)
            start += item.num_tokens
    unknown = Hit.DRAFT if has_draft else Hit.NONE
    return {answer: tuple(unknown if hit is None else hit for hit in tested) for answer, tested in found.items()}


def _test(tested: list[Hit | None], start: int, item: Round) -> None:
    """Record in `tested` what one pass shows of the positions that it tested; its first token has position `start`."""
    num_drafted = item.num_accepted_tokens - item.own.num_accepted
    end = min(start + item.num_accepted_tokens, len(tested))
    for position in range(start, end):
        hit = Hit.DRAFT if position < start + num_drafted else Hit.OWN
        tested[position] = max(hit, tested[position] or Hit.NONE)
    if end < len(tested) and _has_drafts(item) and item.num_accepted_tokens < item.num_draft_tokens:
        missed = Hit.DRAFT if item.counts.num_branch_hits else Hit.NONE
        tested[end] = max(missed, tested[end] or Hit.NONE)


def acceptance_probability(rounds: Iterable[Round]) -> float | None:
    """Return alpha, the accepted share of the draft tokens that were tested; None if there were none.

    A round ends at its first rejection, and later tokens are not tested; acceptance_rate counts them and is lower.
    Passes over the target's own proposals do not count.
    """
    num_accepted = num_decided = 0
    for item in filter(_has_drafts, rounds):
        num_accepted += item.num_accepted_tokens
        num_decided += min(item.num_draft_tokens, item.num_accepted_tokens + 1)
    return num_accepted / num_decided if num_decided else None


def _has_drafts(item: Round) -> bool:
    """Return whether a round has tokens of a draft model."""
    return item.num_draft_tokens > item.own.num_tokens


def measured_costs(
    records: Sequence[RequestRecord], gamma: int, *, alone: Sequence[RequestRecord] | None = None
) -> Costs:
    """Return the measured costs from which the upper bound of speed is computed.

    Args:
        records: records of the requests of one contender, which is a way to serve.
        gamma: most draft tokens of a round; 0 for the target alone.
        alone: records of the target without a draft on the same prompts; None if it was not measured. The cost of
            reading a prompt comes from them, since in the first round with a draft both models read the prompt. Without
            them this cost is 0.
    """
    later = [item for record in records for item in record.rounds[1:]]
    plain = [item for record in alone or () for item in record.rounds[1:]]
    passes_s = _by_width([*later, *plain], gamma + 1)
    first_s = undisturbed_s([record.rounds[0].timings.compute_us for record in alone or () if record.rounds])
    drafted = [item for item in later if _has_drafts(item) and item.timings.draft_us]
    steps_us = [item.timings.draft_us / (item.num_draft_tokens - item.own.num_tokens) for item in drafted]
    steps_us = steps_us or [item.timings.step_us for item in later if item.timings.step_us]
    return Costs(passes_s, undisturbed_s(steps_us), max(0.0, first_s - passes_s[0]))


def _by_width(rounds: Iterable[Round], widest: int) -> tuple[float, ...]:
    """Return the seconds of passes over 1, 2, ... tokens, up to `widest` or the widest pass that was measured.

    Numbers of tokens that were not measured are interpolated. Without any measured pass, all times are 0.
    """
    taken_us: dict[int, list[float]] = {}
    for item in rounds:
        if item.timings.compute_us:
            taken_us.setdefault(item.num_draft_tokens + 1, []).append(item.timings.compute_us)
    if not taken_us:
        return (0.0,) * widest
    known = {width: undisturbed_s(taken_us[width]) for width in sorted(taken_us)}
    return _rising(known, max(widest, *known))


def _rising(known: Mapping[int, float], widest: int) -> tuple[float, ...]:
    """Return the times of passes over 1 to `widest` tokens, none above that of a pass over more tokens.

    Args:
        known: times of the passes that were measured, by their number of tokens; the others are interpolated.
    """
    times = np.interp(range(1, widest + 1), list(known), list(known.values()))
    rising: list[float] = np.minimum.accumulate(times[::-1])[::-1].tolist()
    return tuple(rising)


def undisturbed_s(values_us: Sequence[float]) -> float:
    """Return the tenth percentile of times in microseconds, as seconds; 0 if there are none.

    It stands for all passes, since other processes or the building of graphs delay some of them.
    """
    values = sorted(values_us)
    return values[len(values) // 10] / 1e6 if values else 0.0
