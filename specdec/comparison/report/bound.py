"""Theoretical bound of speed, computed from measured draft step, target pass, acceptance and round trip.

Synchronous rounds (Leviathan, Kalman, Matias, arXiv 2211.17192): a round drafts gamma tokens, verifies them in one
pass, and gives (1 - alpha^(gamma+1)) / (1 - alpha) tokens if every draft token is accepted with probability alpha,
given that all before it were. The cost of a round depends on the topology:

    target        pass(1)                                        gives one token
    fused         gamma * step + pass(gamma + 1)
    distributed   gamma * step + round trip + pass(gamma + 1)

A draft that runs ahead (schedule async, or a pool) has a higher bound. Its work and the network overlap the target's
passes, each of which verifies a full proposal, until a token surprises the draft. A surprise ends 1 - alpha^(gamma+1)
of the passes (the draft must also predict the token after a full proposal), one in 1 / (1 - alpha) tokens. No new
proposal can then arrive for a round trip and a step, unless a branch predicted the token. Meanwhile the target decodes
or looks up by itself; its tokens are assumed to be those that the draft predicted.

All inputs are measured: acceptance, share of surprises that branches cover, tokens of the target's own passes. The best
length up to gamma counts, since servers choose it. Passes over fewer tokens are interpolated between pass(1) and
pass(gamma + 1). Service, scheduling and tokenizing are not counted, which makes this a bound. The theory assumes equal
and independent acceptance, so a measurement may exceed the bound by a few per cent.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from specdec.comparison.plan.record import RequestRecord, Round


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured parts of the bound. Times are in seconds, the tenth percentile of the measured ones.

    Attributes:
        pass_s: target pass of width 1.
        verify_s: target pass over a full proposal, width gamma + 1; `pass_s` if nothing is drafted.
        step_s: draft time per draft token; 0 if nothing is drafted.
        prompt_s: further time of the first pass for reading the prompt.
        own_tokens: tokens of a pass without draft tokens; more than one if the target proposes some itself.
        foreseen: share of the draft's surprises that a branch covers.
    """

    pass_s: float
    verify_s: float
    step_s: float = 0.0
    prompt_s: float = 0.0
    own_tokens: float = 1.0
    foreseen: float = 0.0

    def at_length(self, gamma: int, longest: int) -> Costs:
        """Return the costs for proposals of `gamma` tokens, from these costs for proposals of `longest` tokens."""
        share = gamma / longest if longest else 0.0
        return replace(self, verify_s=self.pass_s + share * (self.verify_s - self.pass_s))


def tokens_per_round(alpha: float, gamma: int) -> float:
    """Return the expected number of tokens of one round.

    Args:
        alpha: probability that a draft token is accepted, given that all before it in its round were; 0 .. 1.
        gamma: draft tokens per round, >= 0.
    """
    if alpha >= 1.0:
        return gamma + 1.0
    return float((1.0 - alpha ** (gamma + 1)) / (1.0 - alpha))


def rounds_s(num_tokens: float, costs: Costs, alpha: float, gamma: int, *, rtt_s: float = 0.0) -> float:
    """Return the seconds that `num_tokens` take in synchronous rounds, with the round trip between draft and target.

    Without draft tokens, every round is a pass of the target by itself.
    """
    if not gamma:
        return num_tokens / costs.own_tokens * (costs.pass_s + rtt_s)
    return num_tokens / tokens_per_round(alpha, gamma) * (gamma * costs.step_s + rtt_s + costs.verify_s)


def run_ahead_s(num_tokens: float, costs: Costs, alpha: float, gamma: int, *, rtt_s: float) -> float:
    """Return the seconds that `num_tokens` take if the draft runs ahead; its first proposals are assumed to be free."""
    own_s = num_tokens / costs.own_tokens * costs.pass_s
    if not gamma:
        return own_s
    full_s = num_tokens / tokens_per_round(alpha, gamma) * costs.verify_s
    if alpha >= 1.0 or full_s >= own_s:
        return min(full_s, own_s)
    between = 1.0 / (1.0 - alpha)  # tokens from one surprise to the next
    gap_s = (rtt_s + costs.step_s) * (1.0 - costs.foreseen)
    cycle_s = full_s * between / num_tokens + gap_s
    rate = (between + gap_s / costs.pass_s * costs.own_tokens) / cycle_s
    head_start = between - rate * (cycle_s - gap_s)  # a session starts with proposals, not with a gap
    return max(full_s, (num_tokens - head_start) / rate)


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
    """Return the measured costs from which the bound of speed is computed.

    Args:
        records: records of one contender.
        gamma: draft tokens per full round; 0 for the target alone.
        alone: records of the target without a draft on the same prompts, if it was measured. The cost of reading a
            prompt comes from them, since the first round of a contender with a draft reads the prompt twice.
    """
    later = [item for record in records for item in record.rounds[1:]]
    full = [item for item in later if item.num_draft_tokens == gamma] or later
    drafted = [item for item in full if item.num_draft_tokens]
    own = [item.num_tokens for item in later if not _has_drafts(item)]
    surprises = [item for item in later if _has_drafts(item) and item.num_accepted_tokens < item.num_draft_tokens]
    num_hits = sum(item.counts.num_branch_hits for item in surprises)
    plain = records if alone is None else alone
    pass_s = _undisturbed_s(_compute_us, [item for record in plain for item in record.rounds[1:]])
    first_s = _undisturbed_s(_compute_us, [record.rounds[0] for record in plain if record.rounds])
    return Costs(
        pass_s=pass_s,
        verify_s=_undisturbed_s(_compute_us, full),
        step_s=_undisturbed_s(lambda item: item.timings.draft_us / item.num_draft_tokens, drafted),
        prompt_s=0.0 if alone is None else max(0.0, first_s - pass_s),
        own_tokens=statistics.fmean(own) if own else 1.0,
        foreseen=min(1.0, num_hits / len(surprises)) if surprises else 0.0,
    )


def _compute_us(item: Round) -> float:
    return item.timings.compute_us


def _undisturbed_s(value_us: Callable[[Round], float], rounds: Sequence[Round]) -> float:
    """Return the tenth percentile in seconds: other processes, or the building of graphs, delayed the slower values."""
    values = sorted(map(value_us, rounds))
    return values[len(values) // 10] / 1e6 if values else 0.0
