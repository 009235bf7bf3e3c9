"""Admission of sessions to a model's slots, each of which has the KV cache of one sequence; the queue is bounded.

A session is the state of one request. An account is the client who pays for the request. The accounts take turns;
the sessions of one account get slots in order of arrival. When all slots are taken, an account with several slots gives
one up for an account that has none. The session that loses its slot becomes the first of its account in the queue, and
continues later after the tokens that it has committed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Generic, Protocol, TypeVar

from specdec.inference.caller import caller
from specdec.inference.engine.prefixes import Prefix, SlotChoice, choose_slot
from specdec.inference.errors import CapacityError
from specdec.inference.model.slots import Backend, CompiledBackend, ForkingBackend


class Holder(Protocol):
    """Session that waits for a slot of the model's KV cache or has one: the members that `Admission` uses."""

    slot: int | None

    @property
    def wanted(self) -> Prefix:
        """Return the prefix of the session's tokens whose keys and values it could reuse if a slot has them already."""

    @property
    def held(self) -> Prefix:
        """Return the prefix of the session's tokens whose keys and values are certainly in its slot."""

    @property
    def can_yield(self) -> bool:
        """Return whether tokens were committed since the session got its slot; then giving it up loses no work."""

    def enter(self, slot: int, num_cached_tokens: int) -> None:
        """Take a slot, whose cache has the first `num_cached_tokens` of this session's tokens already."""

    def leave(self) -> None:
        """Give up the slot; `enter` may give the session another one later."""

    def fail(self, error: Exception) -> None:
        """End the session with an error."""


HolderT = TypeVar("HolderT", bound=Holder)


class Admission(Generic[HolderT]):
    """Slots of a model's KV cache: the free ones, the sessions that have the others, and the queue of waiting sessions.

    Used only on the event loop, except `is_awaited`.

    Args:
        num_slots: most sessions that have a slot at a time.
        max_waiting: most sessions in the queue, not counting those that had a slot and gave it up for another account.
        model: backend that has the slots; None if no session may reuse the content of a freed slot.
        num_spare: number of further slots, which keep the keys and values of sessions that left: a session that gave up
            its slot for another account finds its tokens there when it gets a slot again.
        what: name of the slots in error messages, in the plural.

    Attributes:
        num_slots: most sessions that have a slot at a time.
        waiting: sessions in the queue, each with its account, in order of arrival.
        running: sessions that have a slot, each with its account.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_waiting: int,
        model: Backend | None = None,
        num_spare: int = 0,
        what: str = "slots",
    ) -> None:
        self._free = list(range(num_slots + num_spare - 1, -1, -1))  # the latest used is last
        self.num_slots = num_slots
        self._model = model
        self._can_copy = isinstance(model, ForkingBackend)
        self._left: dict[int, Prefix] = {}  # content of free slots
        self._max_waiting = max_waiting
        self._what = what
        self.waiting: dict[HolderT, str] = {}
        self._begun: set[HolderT] = set()  # those that wait again; the limit of the queue is not for them
        self.running: dict[HolderT, str] = {}
        self._turns: dict[str, int] = {}  # by account with a holder here: number of its latest turn
        self._num_turns = 0
        self._since: dict[int, float] = {}  # by slot: when it was taken
        self._mean_hold_s = 1.0

    @property
    def is_awaited(self) -> bool:
        """Return whether a session waits whose account has no slot; may be read on any thread."""
        return not {*self.waiting.values()} <= {*self.running.values()}

    def enqueue(self, holder: HolderT) -> None:
        """Add a session to the queue for a slot, on the current caller's account.

        If the queue is full and another account has at least two sessions more in it, that account's newest one is
        ended with a CapacityError, and this one takes its place.

        Raises:
            CapacityError: the queue is full, and no account has so many more sessions in it.
        """
        account = caller().account
        if len(self._new()) >= self._max_waiting + self.num_slots - len(self.running):
            self._make_room(account)
        self.waiting[holder] = account

    def _new(self) -> dict[HolderT, str]:
        """Return the waiting sessions that have not yet had a slot, each with its account."""
        return {holder: account for holder, account in self.waiting.items() if holder not in self._begun}

    def _make_room(self, account: str) -> None:
        """Remove the newest session of the account with most sessions from the full queue, ending it with an error.

        Raises:
            CapacityError: no account has at least two more sessions in the queue than `account`.
        """
        new = self._new()
        full = CapacityError(
            f"all {self.num_slots} {self._what} are busy and {len(new)} requests wait already "
            f"(limit {self._max_waiting})",
            retry_after_s=self._retry_after_s(),
        )
        waiting = Counter(new.values())
        flood = max(waiting, key=lambda each: waiting[each], default=account)
        if waiting[flood] <= waiting[account] + 1:
            raise full
        latest = next(each for each in reversed(new) if new[each] == flood)
        self.release(latest)
        latest.fail(full)

    def _retry_after_s(self) -> float:
        """Estimate the seconds until there is room in the queue, from the recent mean time for which a slot is held.

        The result varies at random, so that clients that are refused together do not all return together.
        """
        return max(0.1, self._mean_hold_s / self.num_slots) * random.uniform(1.0, 2.0)

    def admit(self) -> list[tuple[HolderT, SlotChoice]]:
        """Give free slots to waiting sessions.

        Returns:
            The sessions that got a slot, each with the slot and the number of its tokens that are cached already.
        """
        entered = []
        while self.waiting and (len(self.running) < self.num_slots or self._yielded()):
            holder = self._next()
            account = self.running[holder] = self.waiting.pop(holder)
            self._begun.discard(holder)
            self._num_turns += 1
            self._turns[account] = self._num_turns
            place = self._choose(holder)
            self._take(place)
            self._since[place.slot] = time.monotonic()
            holder.enter(place.slot, place.num_tokens)
            entered.append((holder, place))
        return entered

    def _next(self) -> HolderT:
        """Return the first waiting session of the account with fewest slots.

        Of several such accounts, the one that got a slot longest ago is taken.
        """
        held = Counter(self.running.values())

        def standing(holder: HolderT) -> tuple[int, int]:
            account = self.waiting[holder]
            return held[account], self._turns.get(account, 0)

        return min(self.waiting, key=standing)

    def _yielded(self) -> bool:
        """Take a slot from a session for an account that has none, and return whether this was done.

        Returns False if every waiting account has a slot, or no session can give one up. Among the accounts with most
        slots, the session with fewest tokens loses its slot, because its tokens may have to be computed again.
        """
        held = Counter(self.running.values())
        if held[self.waiting[self._next()]]:
            return False
        able = [each for each in self.running if each.can_yield and held[self.running[each]] > 1]
        if not able:
            return False
        holder = min(able, key=lambda each: (-held[self.running[each]], each.held.length))
        account = self.running[holder]
        self.release(holder)
        self.waiting = {holder: account, **self.waiting}
        self._begun.add(holder)
        return True

    def _choose(self, holder: HolderT) -> SlotChoice:
        left = {slot: prefix.length for slot, prefix in self._left.items()}
        return choose_slot(self._free, left, self._shared(holder), can_copy=self._can_copy)

    def _take(self, place: SlotChoice) -> None:
        self._free.remove(place.slot)
        self._left.pop(place.slot, None)
        if place.source_slot in self._free:  # its content was of use, so it is overwritten last
            self._free.remove(place.source_slot)
            self._free.append(place.source_slot)

    def _shared(self, holder: HolderT) -> dict[int, int]:
        """Return, by slot, how many of a session's first tokens it has cached; slots not worth reusing are left out."""
        held, wanted = dict(self._left), holder.wanted
        if self._can_copy:
            held |= {other.slot: other.held for other in self.running if other.slot is not None}
        shared = {slot: wanted.num_shared(prefix) for slot, prefix in held.items()}
        num_tokens = wanted.length + 1
        return {slot: count for slot, count in shared.items() if count and self._is_gain(count, num_tokens)}

    def _is_gain(self, num_held: int, num_tokens: int) -> bool:
        return not isinstance(self._model, CompiledBackend) or self._model.goes_on(num_held, num_tokens)

    def forget(self, slot: int | None) -> None:
        """Let no later session reuse the content of a free slot, which is not valid; `slot` None has no effect."""
        if slot is not None:
            self._left.pop(slot, None)

    def release(self, holder: HolderT) -> None:
        """Remove a session from its slot or from the queue; do nothing if it has left already."""
        accounts = self.waiting if holder.slot is None else self.running
        if holder not in accounts:
            return
        account = accounts.pop(holder)
        self._begun.discard(holder)
        if account not in self.waiting.values() and account not in self.running.values():
            self._turns.pop(account, None)  # accounts without holders are forgotten
        if holder.slot is None:
            return
        self._mean_hold_s += 0.2 * (time.monotonic() - self._since.pop(holder.slot) - self._mean_hold_s)
        self._free.append(holder.slot)
        if self._model is not None and holder.held.length:
            self._left[holder.slot] = holder.held
        holder.leave()
