"""Who holds a slot and who waits for one: first come, first served, with a bounded queue."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

from inference.engine.prefixes import Place, Prefix, choose_place
from inference.errors import CapacityError
from inference.model import PrefixKeeper


class Holder(Protocol):
    """A session as admission sees it."""

    slot: int | None

    @property
    def wanted(self) -> Prefix:
        """Its first tokens, as far as they may come from another sequence."""

    @property
    def held(self) -> Prefix:
        """What its slot is known to hold of it."""

    def enter(self, slot: int, num_cached_tokens: int) -> None:
        """Take a slot, which holds so many of its first tokens."""


HolderT = TypeVar("HolderT", bound=Holder)


class Admission(Generic[HolderT]):
    """Free slots, their holders, and the queue behind them. Used from the event loop alone.

    Args:
        keeper: what the slots belong to; None: what they hold is forgotten when they come free.
    """

    def __init__(self, *, num_slots: int, max_waiting: int, keeper: PrefixKeeper | None = None) -> None:
        self._free = list(range(num_slots - 1, -1, -1))  # used latest last
        self.num_slots = num_slots
        self._keeper = keeper
        self._left: dict[int, Prefix] = {}  # by free slot
        self._max_waiting = max_waiting
        self._waiting: deque[HolderT] = deque()
        self._since: dict[int, float] = {}  # by slot: when it was taken
        self._mean_hold_s = 1.0
        self.running: list[HolderT] = []

    @property
    def waiting(self) -> tuple[HolderT, ...]:
        return tuple(self._waiting)

    def enqueue(self, holder: HolderT) -> None:
        """Queue a holder for a slot.

        Raises:
            CapacityError: all slots are held and the queue is full.
        """
        if len(self._waiting) >= self._max_waiting + len(self._free):
            raise CapacityError(
                f"all {self.num_slots} slots are busy and {len(self._waiting)} requests wait already "
                f"(limit {self._max_waiting})",
                retry_after_s=self._retry_after_s(),
            )
        self._waiting.append(holder)

    def _retry_after_s(self) -> float:
        """Time for one place of the queue to come free, if slots go on being held as long as of late.

        Not the same for all who are refused together, or they would come back together.
        """
        return max(0.1, self._mean_hold_s / self.num_slots) * random.uniform(1.0, 2.0)

    def admit(self) -> list[tuple[HolderT, Place]]:
        """Give free slots to those who wait longest; returns who has entered, and where it begins."""
        entered = []
        while self._free and self._waiting:
            holder = self._waiting.popleft()
            place = self._take_place(holder)
            self._since[place.slot] = time.monotonic()
            holder.enter(place.slot, place.num_tokens)
            self.running.append(holder)
            entered.append((holder, place))
        return entered

    def _take_place(self, holder: HolderT) -> Place:
        left = {slot: prefix.length for slot, prefix in self._left.items()}
        can_copy = self._keeper is not None and self._keeper.can_copy
        place = choose_place(self._free, left, self._shared(holder), can_copy=can_copy)
        self._free.remove(place.slot)
        self._left.pop(place.slot, None)
        if place.source_slot in self._free:  # it was of use
            self._free.remove(place.source_slot)
            self._free.append(place.source_slot)
        return place

    def num_shared(self, holder: HolderT) -> int:
        """How many of a waiting holder's first tokens it will find, as the slots stand now."""
        return max(self._shared(holder).values(), default=0)

    def _shared(self, holder: HolderT) -> dict[int, int]:
        """By slot, how many of a holder's first tokens it holds, where that is a gain."""
        if self._keeper is None:
            return {}
        held = dict(self._left)
        if self._keeper.can_copy:
            held |= {other.slot: other.held for other in self.running if other.slot is not None}
        wanted = holder.wanted
        shared = {slot: wanted.num_shared(prefix) for slot, prefix in held.items()}
        return {slot: count for slot, count in shared.items() if count and self._keeper.pays(count, wanted.length + 1)}

    def forget(self, slot: int | None) -> None:
        """Trust nothing that a free slot holds."""
        if slot is not None:
            self._left.pop(slot, None)

    def release(self, holder: HolderT) -> None:
        """Take a holder out, wherever it is; harmless if it has left already."""
        if holder.slot is None:
            if holder in self._waiting:
                self._waiting.remove(holder)
            return
        self.running.remove(holder)
        self._mean_hold_s += 0.2 * (time.monotonic() - self._since.pop(holder.slot) - self._mean_hold_s)
        self._free.append(holder.slot)
        if self._keeper is not None and holder.held.length:
            self._left[holder.slot] = holder.held
        holder.slot = None
