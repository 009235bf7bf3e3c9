"""What theory allows, from measured parts: the draft's step, the target's pass, the acceptance, the round trip.

Synchronous rounds (Leviathan, Kalman, Matias, arXiv 2211.17192): a round drafts gamma tokens, verifies them in one
pass, and gives (1 - alpha^(gamma+1)) / (1 - alpha) tokens if every draft token is accepted with probability alpha,
given that all before it were. What a round costs depends on the topology:

    target        pass(1)                                        gives one token
    fused         gamma * step + pass(gamma + 1)
    distributed   gamma * step + round trip + pass(gamma + 1)

A draft that runs ahead (schedule async, or a pool) is allowed more: that its work and the network hide behind the
target's passes completely, and that every pass finds a full proposal:

    distributed, async    pass(gamma + 1)

Nothing else is counted: no service, no scheduling, no tokenizing. That is why it is a bound. The model of equal and
independent acceptance is the theory's, so a measurement may come a few per cent above it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from inference.comparison.run.record import RequestRecord, Round


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured parts, medians in seconds.

    Attributes:
        pass_s: target pass of width 1.
        verify_s: target pass over a full proposal, width gamma + 1; `pass_s` where nothing is drafted.
        step_s: draft time per draft token; 0 where nothing is drafted.
        prompt_s: what reading the prompt adds to the first pass.
    """

    pass_s: float
    verify_s: float
    step_s: float = 0.0
    prompt_s: float = 0.0


def tokens_per_round(alpha: float, gamma: int) -> float:
    """Expected tokens of one round.

    Args:
        alpha: probability that a draft token is accepted, given that all before it in its round were; 0 .. 1.
        gamma: draft tokens per round, >= 0.
    """
    if alpha >= 1.0:
        return gamma + 1.0
    return float((1.0 - alpha ** (gamma + 1)) / (1.0 - alpha))


def round_s(costs: Costs, gamma: int, *, rtt_s: float = 0.0) -> float:
    """Seconds of one synchronous round; `rtt_s` is the round trip between draft and target, 0 in one machine."""
    return gamma * costs.step_s + rtt_s + (costs.verify_s if gamma else costs.pass_s)


def tokens_per_s(num_tokens: float, *, per_round: float, round_time_s: float, first_s: float) -> float:
    """Rate of a request of `num_tokens` output tokens in rounds of `round_time_s`; `first_s` passes before them."""
    return num_tokens / (first_s + num_tokens / per_round * round_time_s)


def acceptance_probability(rounds: Iterable[Round]) -> float | None:
    """Alpha: accepted draft tokens / draft tokens that were decided on; None if there were none.

    A round ends at its first rejection; what follows it was never decided on. (acceptance_rate counts it, and so is
    lower.)
    """
    num_accepted = num_decided = 0
    for item in rounds:
        num_accepted += item.num_accepted_tokens
        num_decided += min(item.num_draft_tokens, item.num_accepted_tokens + 1)
    return num_accepted / num_decided if num_decided else None


def measured_costs(
    records: Sequence[RequestRecord], gamma: int, *, alone: Sequence[RequestRecord] | None = None
) -> Costs:
    """The parts, as the requests' own timings tell them.

    Args:
        records: of one contender.
        gamma: draft tokens per full round; 0 for the target alone.
        alone: of the target alone on the same prompts, where it was measured; what reading a prompt costs is taken
            from there, since a draft's first round also reads the prompt with the draft.
    """
    later = [item for record in records for item in record.rounds[1:]]
    full = [item for item in later if item.num_draft_tokens == gamma] or later
    drafted = [item for item in full if item.num_draft_tokens]
    plain = records if alone is None else alone
    pass_s = _median_s(_compute_us, [item for record in plain for item in record.rounds[1:]])
    first_s = _median_s(_compute_us, [record.rounds[0] for record in plain if record.rounds])
    return Costs(
        pass_s=pass_s,
        verify_s=_median_s(_compute_us, full),
        step_s=_median_s(lambda item: item.timings.draft_us / item.num_draft_tokens, drafted),
        prompt_s=0.0 if alone is None else max(0.0, first_s - pass_s),
    )


def _compute_us(item: Round) -> float:
    return item.timings.compute_us


def _median_s(value_us: Callable[[Round], float], rounds: Sequence[Round]) -> float:
    return statistics.median(map(value_us, rounds)) / 1e6 if rounds else 0.0
