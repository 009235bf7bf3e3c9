"""Pacing of a draft: how far ahead of the target it drafts, with how many branches, and in how large messages.

Three costs decide, all from measured times. Drafting one more token delays the tokens before it, for which the target
may wait. Reading a message takes the target time, so a message must be expected to save more than that. A draft token
saves nothing if the target has decoded its position before the token arrives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.inference.request import MAX_GAMMA
from specdec.inference.scheduling.throughput import fastest

MESSAGE_S = 0.2e-3
"""Seconds of the target's CPU that a message is assumed to cost, apart from its pass."""
MIN_SURVIVAL = 0.05
"""Probability that a whole chain is accepted, below which the draft does not extend the chain."""
CHUNK_OF_PASS = 0.4
"""Longest time, as a part of a target pass, for which the draft collects tokens before it sends them."""
MESSAGE_OF_CHUNK = 0.05
"""Cost of a message, as a share of the longest time for which the draft collects tokens for it."""
MIN_ROUND_TRIP_OF_PASS = 0.5
"""Shortest round trip, as a multiple of a pass, at which branches gain anything."""
MAX_WINDOW = 128
"""Most draft tokens past the committed ones; with the branches beside them they fit into the target's tree."""
MAX_BRANCH_DEPTH = 12
"""Most draft tokens of a branch after its first one."""
MIN_BRANCHED_CHAIN = 3
"""Shortest chain beside which branches are made."""
MIN_BRANCH_MASS = 0.05
"""Least probability that a chain's first rejected token is just this one, at which an alternative branch is drafted."""


@dataclass(frozen=True, slots=True)
class Branching:
    """Limits of the branches beside a chain of draft tokens: alternatives, which begin with the second best token.

    Attributes:
        count: most branches per sequence at a time.
        depth: draft tokens of a branch after its first one.
        min_chain: shortest chain that gets branches; while the chain is shorter, branches would delay it too much.
    """

    count: int = 0
    depth: int = 0
    min_chain: int = 0


NO_BRANCHES = Branching()


@dataclass(frozen=True, slots=True)
class Pacing:
    """Limits of a draft worker's drafting for one sequence: length, branches and messages.

    Attributes:
        window: most draft tokens past the committed ones; 0 stops drafting.
        chunk: draft tokens per message while the chain grows.
        step_s: seconds of a draft step; 0 if messages do not depend on it.
        round_s: seconds of a pass plus a round trip; the first message must have enough draft tokens for this time.
        num_ahead: tokens that the target is expected to commit before a message arrives.
        min_gain: passes that a message must be expected to save.
        min_survival: probability that a whole chain is accepted, below which the draft does not extend the chain.
        branching: limits of branches beside the chain.
    """

    window: int = 0
    chunk: int = 1
    step_s: float = 0.0
    round_s: float = 0.0
    num_ahead: int = 0
    min_gain: float = 0.0
    min_survival: float = 0.0
    branching: Branching = NO_BRANCHES


@dataclass(frozen=True, slots=True)
class Measured:
    """Times that a draft worker has measured, in seconds; 0 while unknown.

    Attributes:
        step_s: one step of the draft.
        pass_s: one pass of the target.
        round_trip_s: one round trip between draft worker and target.
    """

    step_s: float
    pass_s: float
    round_trip_s: float


def choose_pacing(gamma: int, num_branches: int, measured: Measured) -> Pacing:
    """Return the limits of drafting for a draft that goes on before the target has verified its earlier tokens.

    While times are unknown, the draft makes `gamma` tokens, sends them in one message, and makes no branches.

    Args:
        gamma: most draft tokens that one pass of the target verifies; 0: none are drafted.
        num_branches: most branches per sequence at a time.
        measured: measured times.
    """
    step_s, pass_s = measured.step_s, measured.pass_s
    if not gamma or not step_s or not pass_s:
        return Pacing(window=gamma, chunk=max(1, gamma))
    round_s = pass_s + measured.round_trip_s
    num_ahead = int(min(MAX_GAMMA, measured.round_trip_s / pass_s))
    chunk_s = min(CHUNK_OF_PASS * pass_s, MESSAGE_S / MESSAGE_OF_CHUNK)
    return Pacing(
        window=math.ceil(min(MAX_WINDOW, max(gamma + num_ahead, (round_s + pass_s) / step_s))),
        chunk=max(1, math.ceil(min(gamma, chunk_s / step_s))),
        step_s=step_s,
        round_s=round_s,
        num_ahead=num_ahead,
        min_gain=MESSAGE_S / pass_s,
        min_survival=MIN_SURVIVAL,
        branching=choose_branching(num_branches, measured),
    )


def choose_branching(limit: int, measured: Measured) -> Branching:
    """Return the limits of branches, which give the target draft tokens for the round trip after a rejection.

    Args:
        limit: number of branches per sequence for which the draft model has slots.
        measured: measured times.

    Returns:
        Branches that are as long as the target needs in a round trip, at eight tokens per pass, and no longer than the
        draft can make meanwhile; none if there are no slots, times are unknown, or the round trip is short.
    """
    step_s, pass_s, round_trip_s = measured.step_s, measured.pass_s, measured.round_trip_s
    if not limit or not step_s or not pass_s or round_trip_s < MIN_ROUND_TRIP_OF_PASS * pass_s:
        return NO_BRANCHES
    longest = min(MAX_BRANCH_DEPTH, 8 * round_trip_s / pass_s + 1, round_trip_s / step_s)
    depth = max(1, math.ceil(longest))
    return Branching(limit, depth, min_chain=min(depth, MIN_BRANCHED_CHAIN))


def is_first_message_complete(survivals: list[float], pacing: Pacing) -> bool:
    """Return whether to send a chain's first message now, instead of with one more draft token a step later.

    The target waits for it, or decodes without draft tokens. The next token is assumed to be accepted as often as the
    last one.

    Args:
        survivals: per draft token of the chain, at least one, the probability that it and all before it are accepted.
        pacing: limits of the drafting.
    """
    seconds, tokens = pacing.round_s + len(survivals) * pacing.step_s, 1.0 + sum(survivals)
    if survivals[-1] <= 0.0:  # a draft that was never right: the product has underflown
        return True
    next_survival = survivals[-1] * (survivals[-1] / survivals[-2] if len(survivals) > 1 else survivals[-1])
    return fastest([(tokens, seconds), (tokens + next_survival, seconds + pacing.step_s)]) == 0


def expected_gain(survivals: list[float], num_before: int, pacing: Pacing) -> float:
    """Return how many passes the target is expected to save by the unsent tokens of a chain.

    Tokens whose positions the target decodes before they arrive save none.

    Args:
        survivals: per draft token of the chain, the probability that it and all before it are accepted.
        num_before: number of the chain's first tokens, which have been sent before.
        pacing: limits of the drafting.
    """
    return sum(survivals[max(num_before, pacing.num_ahead) :])
