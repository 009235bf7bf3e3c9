"""Who holds a slot and who waits for one: first come, first served, with a bounded queue."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

from inference.errors import CapacityError


class Holder(Protocol):
    """A session as admission sees it."""

    slot: int | None

    def enter(self, slot: int) -> None:
        """Take a slot."""


HolderT = TypeVar("HolderT", bound=Holder)


class Admission(Generic[HolderT]):
    """Free slots, their holders, and the queue behind them. Used from the event loop alone."""

    def __init__(self, *, num_slots: int, max_waiting: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self.num_slots = num_slots
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

    def admit(self) -> None:
        """Give free slots to those who wait longest."""
        while self._free and self._waiting:
            holder = self._waiting.popleft()
            slot = self._free.pop()
            self._since[slot] = time.monotonic()
            holder.enter(slot)
            self.running.append(holder)

    def release(self, holder: HolderT) -> None:
        """Take a holder out, wherever it is; harmless if it has left already."""
        if holder.slot is None:
            if holder in self._waiting:
                self._waiting.remove(holder)
            return
        self.running.remove(holder)
        self._mean_hold_s += 0.2 * (time.monotonic() - self._since.pop(holder.slot) - self._mean_hold_s)
        self._free.append(holder.slot)
        holder.slot = None
