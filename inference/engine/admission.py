"""Who holds a slot and who waits for one: accounts by turns, and of each the first that came; with a bounded queue."""

from __future__ import annotations

import time
from collections import Counter
from typing import Generic, Protocol, TypeVar

from inference.caller import caller
from inference.errors import CapacityError


class Holder(Protocol):
    """A session as admission sees it."""

    slot: int | None

    def enter(self, slot: int) -> None:
        """Take a slot."""

    def fail(self, error: Exception) -> None:
        """End with an error."""


HolderT = TypeVar("HolderT", bound=Holder)


class Admission(Generic[HolderT]):
    """Free slots, their holders, and the queue behind them. Used from the event loop alone."""

    def __init__(self, *, num_slots: int, max_waiting: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self.num_slots = num_slots
        self._max_waiting = max_waiting
        self._waiting: dict[HolderT, str] = {}  # on whose account; in the order in which they came
        self._held: dict[HolderT, str] = {}  # likewise, of those with a slot
        self._turns: dict[str, int] = {}  # by account that is here: when it last got a slot
        self._num_turns = 0
        self._since: dict[int, float] = {}  # by slot: when it was taken
        self._mean_hold_s = 1.0
        self.running: list[HolderT] = []

    @property
    def waiting(self) -> tuple[HolderT, ...]:
        return tuple(self._waiting)

    def enqueue(self, holder: HolderT) -> None:
        """Queue a holder for a slot, on the account of whoever asks now.

        A full queue makes room for an account that has less in it than another: the latest of that one's has to go.

        Raises:
            CapacityError: all slots are held and the queue is full.
        """
        account = caller().account
        if len(self._waiting) >= self._max_waiting + len(self._free):
            full = CapacityError(
                f"all {self.num_slots} slots are busy and {len(self._waiting)} requests wait already "
                f"(limit {self._max_waiting})",
                retry_after_s=self._retry_after_s(),
            )
            waiting = Counter(self._waiting.values())
            flood = max(waiting, key=lambda each: waiting[each], default=account)
            if waiting[flood] <= waiting[account] + 1:
                raise full
            latest = next(each for each in reversed(self._waiting) if self._waiting[each] == flood)
            del self._waiting[latest]
            latest.fail(full)
        self._waiting[holder] = account

    def _retry_after_s(self) -> float:
        """Time for one place of the queue to come free, if slots go on being held as long as of late."""
        return max(0.1, self._mean_hold_s / self.num_slots)

    def admit(self) -> None:
        """Give free slots to those who wait."""
        while self._free and self._waiting:
            holder = self._next()
            account = self._held[holder] = self._waiting.pop(holder)
            self._num_turns += 1
            self._turns[account] = self._num_turns
            slot = self._free.pop()
            self._since[slot] = time.monotonic()
            holder.enter(slot)
            self.running.append(holder)

    def _next(self) -> HolderT:
        """Who waits longest, of the account that has least: slots now, or else the one whose turn is longest ago."""
        held = Counter(self._held.values())
        return min(self._waiting, key=lambda each: self._standing(held, self._waiting[each]))

    def _standing(self, held: Counter[str], account: str) -> tuple[int, int]:
        return held[account], self._turns.get(account, 0)

    def release(self, holder: HolderT) -> None:
        """Take a holder out, wherever it is; harmless if it has left already."""
        if holder.slot is None:
            self._waiting.pop(holder, None)
            return
        self.running.remove(holder)
        self._forget(self._held.pop(holder))
        self._mean_hold_s += 0.2 * (time.monotonic() - self._since.pop(holder.slot) - self._mean_hold_s)
        self._free.append(holder.slot)
        holder.slot = None

    def _forget(self, account: str) -> None:
        """Keep nothing of an account that has nothing here."""
        if account not in self._waiting.values() and account not in self._held.values():
            del self._turns[account]
