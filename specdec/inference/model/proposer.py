"""Proposers: sources of draft tokens, which add them one step at a time to chains of such tokens."""

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
        slot: the sequence's slot in the draft model.
        token_ids: committed tokens, then the draft tokens so far; not changed while the step runs.
        sampling: how the target will choose tokens.
        limit: number of tokens wanted at most, >= 1.
        output_start: as in `Turn`.
        source_slot: another slot, to copy keys and values from, since it may hold more of this chain; None: no other.
        grammar, tally: as in `Turn`.
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
    """Token that a draft model chose.

    Attributes:
        runner_up: the second best token under the same noise; None if it was not asked for.
        margin: by how much the token's score exceeds the runner-up's: logits, or log-probabilities with noise.
        is_forced: True if a grammar left no choice, and the token took no pass.
    """

    token_id: int
    runner_up: int | None = None
    margin: float = math.inf
    is_forced: bool = False


class Proposer(Protocol):
    """A source of draft tokens for many sequences.

    One thread calls it; the attributes are constants. Proposals affect speed only, never the answer, so a proposer may
    be wrong, and may ignore `sampling` and `grammar`. One that repeats the last token is complete:

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
        """Extend every draft by one step; the drafts have distinct slots.

        Args:
            ranked: True if runner-ups and margins are wanted too; a proposer without them leaves the defaults.

        Returns:
            Per draft, its next 1 .. limit tokens. Per draft, an empty list means that there is nothing to propose. None
            means that the step read a part of a long prompt, and more steps are needed.
        """
