"""Who holds a slot and who waits for one: accounts by turns, and of each the first that came; with a bounded queue."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Generic, Protocol, TypeVar

from inference.caller import caller
from inference.engine.prefixes import Place, Prefix, choose_place
from inference.errors import CapacityError
from inference.model.slots import Backend, CompiledBackend, ForkingBackend


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

    def fail(self, error: Exception) -> None:
        """End with an error."""


HolderT = TypeVar("HolderT", bound=Holder)


class Admission(Generic[HolderT]):
    """Free slots, their holders, and the queue behind them. Used from the event loop alone.

    Args:
        model: whose slots they are; None: what they hold is forgotten when they come free.
    """

    def __init__(self, *, num_slots: int, max_waiting: int, model: Backend | None = None) -> None:
        self._free = list(range(num_slots - 1, -1, -1))  # used latest last
        self.num_slots = num_slots
        self._model = model
        self._left: dict[int, Prefix] = {}  # by free slot
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

        Raises:
            CapacityError: all slots are held and the queue is full.
        """
        account = caller().account
        if len(self._waiting) >= self._max_waiting + len(self._free):
            self._make_room(account)
        self._waiting[holder] = account

    def _make_room(self, account: str) -> None:
        """In a full queue, for an account that has less in it than another: the latest of that one has to go.

        Raises:
            CapacityError: there is no such account.
        """
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
        self.release(latest)
        latest.fail(full)

    def _retry_after_s(self) -> float:
        """Time for one place of the queue to come free, if slots go on being held as long as of late.

        Not the same for all who are refused together, or they would come back together.
        """
        return max(0.1, self._mean_hold_s / self.num_slots) * random.uniform(1.0, 2.0)

    def admit(self) -> list[tuple[HolderT, Place]]:
        """Give free slots to those who wait; returns who has entered, and where it begins."""
        entered = []
        while self._free and self._waiting:
            holder = self._next()
            account = self._held[holder] = self._waiting.pop(holder)
            self._num_turns += 1
            self._turns[account] = self._num_turns
            place = self._choose(holder)
            self._take(place)
            self._since[place.slot] = time.monotonic()
            holder.enter(place.slot, place.num_tokens)
            self.running.append(holder)
            entered.append((holder, place))
        return entered

    def _next(self) -> HolderT:
        """Who waits longest, of the account that has least: slots now, or else the one whose turn is longest ago."""
        held = Counter(self._held.values())

        def standing(holder: HolderT) -> tuple[int, int]:
            account = self._waiting[holder]
            return held[account], self._turns.get(account, 0)

        return min(self._waiting, key=standing)

    def _choose(self, holder: HolderT) -> Place:
        left = {slot: prefix.length for slot, prefix in self._left.items()}
        return choose_place(self._free, left, self._shared(holder), can_copy=isinstance(self._model, ForkingBackend))

    def _take(self, place: Place) -> None:
        self._free.remove(place.slot)
        self._left.pop(place.slot, None)
        if place.source_slot in self._free:  # it was of use
            self._free.remove(place.source_slot)
            self._free.append(place.source_slot)

    def num_cached(self, holder: HolderT) -> int:
        """How many of its first tokens a holder would find, if it entered now; 0 while no slot is free."""
        return self._choose(holder).num_tokens if self._free else 0

    def _shared(self, holder: HolderT) -> dict[int, int]:
        """By slot, how many of a holder's first tokens it holds, where that is a gain."""
        held, wanted = dict(self._left), holder.wanted
        if isinstance(self._model, ForkingBackend):
            held |= {other.slot: other.held for other in self.running if other.slot is not None}
        shared = {slot: wanted.num_shared(prefix) for slot, prefix in held.items()}
        num_tokens = wanted.length + 1
        return {slot: count for slot, count in shared.items() if count and self._is_gain(count, num_tokens)}

    def _is_gain(self, num_held: int, num_tokens: int) -> bool:
        return not isinstance(self._model, CompiledBackend) or self._model.goes_on(num_held, num_tokens)

    def forget(self, slot: int | None) -> None:
        """Trust nothing that a free slot holds."""
        if slot is not None:
            self._left.pop(slot, None)

    def release(self, holder: HolderT) -> None:
        """Take a holder out, wherever it is; harmless if it has left already."""
        accounts = self._waiting if holder.slot is None else self._held
        if holder not in accounts:
            return
        account = accounts.pop(holder)
        if account not in self._waiting.values() and account not in self._held.values():
            self._turns.pop(account, None)  # nothing is kept of who has nothing here
        if holder.slot is None:
            return
        self.running.remove(holder)
        self._mean_hold_s += 0.2 * (time.monotonic() - self._since.pop(holder.slot) - self._mean_hold_s)
        self._free.append(holder.slot)
        if self._model is not None and holder.held.length:
            self._left[holder.slot] = holder.held
        holder.slot = None
