"""Admission of requests of several accounts: which request gets the next slot, and which session gives its slot up."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.caller import Caller, request_context
from specdec.inference.engine.admission import Admission
from specdec.inference.engine.prefixes import Prefix
from specdec.inference.errors import CapacityError

NOTHING = Prefix((), 0)


class Request:
    """A request for tests of admission without an engine; it records its slot and its error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slot: int | None = None
        self.can_yield = True
        self.held = NOTHING
        self.error: Exception | None = None

    @property
    def wanted(self) -> Prefix:
        return NOTHING

    def enter(self, slot: int, num_cached_tokens: int) -> None:
        self.slot = slot

    def leave(self) -> None:
        self.slot = None

    def fail(self, error: Exception) -> None:
        self.error = error


class Desk:
    """An admission with requests that have names; the first letter of a name is the request's account."""

    def __init__(self, *, num_slots: int, max_waiting: int) -> None:
        self.admission: Admission[Request] = Admission(num_slots=num_slots, max_waiting=max_waiting)
        self.requests: dict[str, Request] = {}

    def ask(self, *names: str) -> None:
        for name in names:
            self.requests[name] = Request(name)
            with request_context(Caller(name[0]), name):
                self.admission.enqueue(self.requests[name])

    def require_consistent(self) -> None:
        """Assert that slots, running requests, kept prefixes and the queue are consistent with one another."""
        admission = self.admission
        held = [holder.slot for holder in admission.running if holder.slot is not None]
        assert sorted([*held, *admission._free]) == list(range(admission.num_slots))
        assert set(held) == admission._since.keys()
        assert len(held) == len(admission.running)
        assert admission._left.keys() <= set(admission._free)
        assert all(holder.slot is None for holder in admission.waiting)
        assert admission._turns.keys() <= {*admission.running.values(), *admission.waiting.values()}

    def running(self) -> list[str]:
        self.admission.admit()
        return [request.name for request in self.admission.running]

    def served(self) -> list[str]:
        """Let each request finish in turn; return their names in the order in which they got the only slot."""
        order = []
        while names := self.running():
            order.append(names[0])
            self.admission.release(self.requests[names[0]])
        return order


def test_a_flood_of_one_does_not_starve_another() -> None:
    desk = Desk(num_slots=1, max_waiting=20)
    desk.ask(*(f"a{i}" for i in range(6)))
    assert desk.running() == ["a0"]
    desk.ask("b0", "b1", "c0")
    assert desk.served() == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_a_freed_slot_goes_to_the_account_with_fewest() -> None:
    desk = Desk(num_slots=3, max_waiting=20)
    desk.ask("a0", "a1", "b0")
    assert desk.running() == ["a0", "b0", "a1"]
    desk.ask("a2", "b1")
    desk.admission.release(desk.requests["b0"])
    assert desk.running() == ["a0", "a1", "b1"]


def test_an_account_with_several_slots_gives_one_to_an_account_that_has_none() -> None:
    """An account without a slot gets one of the account with most slots: that of its session with fewest tokens."""
    desk = Desk(num_slots=3, max_waiting=20)
    desk.ask("a0", "a1", "a2", "a3")
    assert desk.running() == ["a0", "a1", "a2"]
    for name, length in (("a0", 9), ("a1", 5), ("a2", 7)):
        desk.requests[name].held = Prefix(range(length), length)
    desk.ask("b0")
    assert desk.running() == ["a0", "a2", "b0"]
    assert desk.running() == ["a0", "a2", "b0"]
    desk.ask("c0")
    assert desk.running() == ["a0", "b0", "c0"]
    desk.ask("d0")
    assert desk.running() == ["a0", "b0", "c0"]  # the only slot of an account is not taken from it
    for name, then in (("d0", ["a0", "b0", "c0"]), ("b0", ["a0", "c0", "a2"]), ("c0", ["a0", "a2", "a1"])):
        desk.admission.release(desk.requests[name])
        assert desk.running() == then


def test_no_slot_is_given_up_before_it_was_of_use() -> None:
    desk = Desk(num_slots=2, max_waiting=20)
    desk.ask("a0", "a1")
    assert desk.running() == ["a0", "a1"]
    for request in desk.requests.values():
        request.can_yield = False
    desk.ask("b0")
    assert desk.running() == ["a0", "a1"]
    desk.requests["a1"].can_yield = True
    assert desk.running() == ["a0", "b0"]


def test_a_full_queue_makes_no_room_by_an_answer_that_has_begun() -> None:
    desk = Desk(num_slots=3, max_waiting=1)
    desk.ask("a0", "a1", "a2")
    assert desk.running() == ["a0", "a1", "a2"]
    desk.ask("b0")
    assert desk.running() == ["a1", "a2", "b0"]
    desk.ask("c0")
    assert desk.running() == ["a2", "b0", "c0"]
    desk.ask("d0")
    with pytest.raises(CapacityError, match="1 requests wait"):
        desk.ask("e0")
    assert {name: request.error for name, request in desk.requests.items() if request.error} == {}


def test_accounts_that_left_the_queue_are_forgotten() -> None:
    """An account whose last request leaves the queue takes no more memory.

    Regression: an account stayed in memory for ever if its last request was cancelled in the queue, or removed from it
    for another one.
    """
    desk = Desk(num_slots=1, max_waiting=2)
    desk.ask("a0")
    assert desk.running() == ["a0"]
    desk.ask("a1", "a2", "b0")  # a2 has to go
    assert desk.requests["a2"].error is not None
    for name in ("a0", "a1", "b0"):
        desk.admission.release(desk.requests[name])
        desk.admission.release(desk.requests[name])  # harmless
    desk.require_consistent()


def test_one_account_is_served_as_it_came() -> None:
    desk = Desk(num_slots=2, max_waiting=20)
    desk.ask(*(f"a{i}" for i in range(5)))
    assert desk.served() == [f"a{i}" for i in range(5)]


def test_a_full_queue_prefers_callers_with_less() -> None:
    """In a full queue, a request of an account with few requests replaces one of an account with many."""
    desk = Desk(num_slots=1, max_waiting=3)
    desk.ask("a0")
    assert desk.running() == ["a0"]
    desk.ask("a1", "a2", "a3")
    desk.ask("b0")
    assert isinstance(desk.requests["a3"].error, CapacityError)
    for latecomer in ("a4", "b1"):  # b has one, a two: no injustice is left
        with pytest.raises(CapacityError, match="all 1 slots are busy and 3 requests wait already"):
            desk.ask(latecomer)
    desk.admission.release(desk.requests["a3"])  # as a waiting session does: harmless
    assert desk.served() == ["a0", "b0", "a1", "a2"]


def test_retry_times_are_spread() -> None:
    desk = Desk(num_slots=1, max_waiting=0)
    desk.ask("a0")
    hints = set()
    for number in range(20):
        with pytest.raises(CapacityError) as caught:
            desk.ask(f"a{number + 1}")
        hints.add(caught.value.retry_after_s)
    assert len(hints) > 10
    assert 0.1 <= min(hints) <= max(hints) <= 10


@given(st.lists(st.tuples(st.sampled_from(["ask", "admit", "release"]), st.integers(0, 5)), max_size=40))
def test_slots_and_queue_never_contradict(steps: list[tuple[str, int]]) -> None:
    desk = Desk(num_slots=2, max_waiting=2)
    for number, (step, choice) in enumerate(steps):
        with suppress(CapacityError):
            if step == "ask":
                desk.ask(f"{'abc'[choice % 3]}{number}")
            elif step == "admit":
                desk.admission.admit()
            elif desk.requests:
                desk.admission.release([*desk.requests.values()][choice % len(desk.requests)])
        desk.require_consistent()
