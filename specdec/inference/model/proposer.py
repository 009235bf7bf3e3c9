"""Contract of proposers: sources of draft tokens, which extend a chain of such tokens in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.inference.model.decoder import Matcher
from specdec.inference.model.token_map import SAME_IDS, TokenMap
from specdec.inference.request import SamplingParams
from specdec.inference.tokens import Tally


@dataclass(frozen=True, slots=True)
class Draft:
    """Chain of draft tokens after a sequence, for a proposer to extend.

    Attributes:
        slot: slot of the chain in the draft model.
        token_ids: committed tokens, then the draft tokens so far; not changed while the step runs.
        sampling: how the target will choose tokens.
        limit: most tokens that are wanted, at least 1.
        output_start: position of the sequence's first output token.
        source_slot: another slot that may hold more of this chain, from which keys and values can be copied; None if
            there is none.
        grammar: matcher of the grammar that binds the output; None if any output is allowed.
        tally: token counts for penalties, kept between steps; None: count again.
        token_map: map from the target's token ids to the draft model's.
    """

    slot: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    limit: int
    output_start: int = 0
    source_slot: int | None = None
    grammar: Matcher | None = None
    tally: Tally | None = None
    token_map: TokenMap = SAME_IDS


@dataclass(frozen=True, slots=True)
class DraftToken:
    """Token that a proposer chose.

    Attributes:
        token_id: the token.
        runner_up: the second best token, by the scores of `margin`; None if it is not known.
        margin: score of the token less that of the runner-up, where scores are logits, or with sampling processed
            logits plus the random numbers (Gumbel noise) by which tokens are sampled; infinite without a runner-up.
        is_forced: True if a grammar left no choice, so that the token took no pass of a model.
    """

    token_id: int
    runner_up: int | None = None
    margin: float = math.inf
    is_forced: bool = False


class Proposer(Protocol):
    """Source of draft tokens for many sequences.

    One thread calls `extend`; the attributes are constants. Draft tokens affect speed only, never the answer, so a
    proposer may be wrong, and may ignore `sampling` and `grammar`. One that repeats the last token is complete:

        class Repeater:
            num_slots, max_length, num_branches = 8, 4096, 0

            def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
                return [[DraftToken(draft.token_ids[-1])] * draft.limit for draft in drafts]

    Attributes:
        num_slots: number of sequences.
        max_length: length of the longest chain, committed tokens included, that can be extended by one.
        num_branches: number of slots that each sequence has for branches beside its chain. Those of slot s are
            num_slots + s * num_branches + b for b = 0 .. num_branches - 1.
    """

    num_slots: int
    max_length: int
    num_branches: int

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        """Extend every chain by one step.

        Args:
            drafts: the chains, of distinct slots.
            ranked: True if runner-ups and margins are wanted too; a proposer without them leaves the defaults.

        Returns:
            Per chain, its next tokens, at most `limit`; an empty list if there is nothing to propose; None if the step
            only read a part of a long prompt, so that more steps are needed.
        """
