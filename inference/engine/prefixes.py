"""What slots hold of sequences, and which slot a new one takes for it. Pure: knows tokens, no model.

A sequence begins behind the longest prefix that any slot holds. It takes that slot itself where this overwrites nothing
of use, or else a copy in the slot that was left longest ago. Where slots cannot be copied it takes over what saves at
least as much as it overwrites: a greeting that many share must not cost somebody a long conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from inference.tokens import TokenView, common_length


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of a sequence.

    Attributes:
        token_ids: of the sequence, which may go on growing.
        length: how many of them are meant.
        salt: sequences of unlike ones have nothing in common.
    """

    token_ids: Sequence[int]
    length: int
    salt: str = ""

    def num_shared(self, other: Prefix) -> int:
        """How many of the first tokens are the same."""
        if self.salt != other.salt:
            return 0
        return common_length(*(TokenView(each.token_ids, end=each.length) for each in (self, other)))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sequence begins.

    Attributes:
        slot: that it takes.
        source_slot: that holds its first tokens; the same one, or another to copy them from.
        num_tokens: how many these are.
    """

    slot: int
    source_slot: int
    num_tokens: int = 0


def choose_place(free: Sequence[int], left: Mapping[int, int], shared: Mapping[int, int], *, can_copy: bool) -> Place:
    """The slot of a new sequence, and what it begins with.

    Args:
        free: slots that may be taken, the one that was left longest ago first; at least one.
        left: by free slot, how many tokens an earlier sequence has left there; none where it is not named.
        shared: by slot, how many of the first tokens it holds; also slots of others, if they can be copied.
    """
    oldest = _oldest(free, left)
    room = {slot for slot in free if slot == oldest or _can_overwrite(slot, left, shared, can_copy=can_copy)}
    usable: Collection[int] = shared.keys() if can_copy else room & shared.keys()
    source = max(usable, key=lambda slot: (shared[slot], slot in room, -left.get(slot, 0)), default=oldest)
    if not shared.get(source):
        return Place(oldest, oldest)
    return Place(source if source in room else oldest, source, shared[source])


def _oldest(free: Sequence[int], left: Mapping[int, int]) -> int:
    """The slot in which least is lost: the latest of those that hold nothing, or that which was left longest ago."""
    return next((slot for slot in reversed(free) if not left.get(slot)), free[0])


def _can_overwrite(slot: int, left: Mapping[int, int], shared: Mapping[int, int], *, can_copy: bool) -> bool:
    num_shared = shared.get(slot, 0)
    return left.get(slot, 0) - num_shared <= (0 if can_copy else num_shared)
