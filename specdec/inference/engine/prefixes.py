"""Prefixes whose keys and values are in a model's slots, and the choice of a slot for a new sequence.

A sequence reuses the longest prefix that any slot has. If it overwrites nothing useful in the slot of that prefix, it
takes that slot; otherwise the prefix is copied to an empty slot, or to the one that was left longest ago. If the
backend cannot copy slots, the sequence gets the slot of a prefix only if at least as many tokens are reused there as
are overwritten: else a sequence that shares only a greeting would erase a long conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from specdec.inference.tokens import TokenView, common_length


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of a sequence.

    Attributes:
        token_ids: the sequence's tokens; the list may grow.
        length: number of tokens in the prefix.
        salt: cache salt; sequences with different salts share nothing.
    """

    token_ids: Sequence[int]
    length: int
    salt: str = ""

    def num_shared(self, other: Prefix) -> int:
        """Return how many tokens both prefixes have in common at their beginning; 0 if their salts differ."""
        if self.salt != other.salt:
            return 0
        return common_length(*(TokenView(each.token_ids, end=each.length) for each in (self, other)))


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """Slot chosen for a new sequence, and how many of the sequence's first tokens are reused from the prefix cache.

    Attributes:
        slot: the slot that the sequence takes.
        source_slot: the slot that has the sequence's first tokens cached: `slot` itself, or another one to copy from.
        num_tokens: number of these cached tokens; 0 if none is reused.
    """

    slot: int
    source_slot: int
    num_tokens: int = 0


def choose_slot(
    free: Sequence[int], left: Mapping[int, int], shared: Mapping[int, int], *, can_copy: bool
) -> SlotChoice:
    """Return the slot for a new sequence, and how many cached tokens it begins with.

    Args:
        free: slots that may be taken, the one that was left longest ago first; at least one.
        left: by free slot, the number of tokens that an earlier sequence left in it; a slot without an entry holds
            none.
        shared: by slot, free or in use, the number of the new sequence's first tokens that the slot has; a slot without
            an entry has none.
        can_copy: True if the backend can copy the content of one slot to another.
    """
    oldest = _oldest(free, left)
    room = {slot for slot in free if slot == oldest or _can_overwrite(slot, left, shared, can_copy=can_copy)}
    usable: Collection[int] = shared.keys() if can_copy else room & shared.keys()
    source = max(usable, key=lambda slot: (shared[slot], slot in room, -left.get(slot, 0)), default=oldest)
    if not shared.get(source):
        return SlotChoice(oldest, oldest)
    return SlotChoice(source if source in room else oldest, source, shared[source])


def _oldest(free: Sequence[int], left: Mapping[int, int]) -> int:
    """Return the slot to overwrite: the most recently freed empty slot, else the slot that was left longest ago."""
    return next((slot for slot in reversed(free) if not left.get(slot)), free[0])


def _can_overwrite(slot: int, left: Mapping[int, int], shared: Mapping[int, int], *, can_copy: bool) -> bool:
    num_shared = shared.get(slot, 0)
    return left.get(slot, 0) - num_shared <= (0 if can_copy else num_shared)
