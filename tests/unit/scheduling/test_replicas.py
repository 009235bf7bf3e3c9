"""Choice of the server that a request goes to, among replicas (servers with the same model)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.scheduling.replicas import (
    FIRST_PAUSE_S,
    FORGIVEN_AFTER_S,
    MAX_FAILURES,
    MAX_PAUSE_S,
    NEAR,
    Replicas,
)

ADDRESSES = ("a:1", "b:1", "c:1")


def replicas(*ready: str) -> Replicas:
    found = Replicas()
    found.keep(ADDRESSES)
    for address in ready:
        found.records[address].ready = True
    return found


def eject(found: Replicas, address: str, now: float) -> None:
    for _ in range(MAX_FAILURES):
        found.ended(address, now, failed=True)


def test_the_least_loaded_is_chosen_and_equals_take_turns() -> None:
    found = replicas(*ADDRESSES)
    assert sorted(str(found.choose(0.0)) for _ in range(3)) == list(ADDRESSES)
    found.ended("b:1", 0.0, failed=False)
    assert found.choose(0.0) == "b:1"
    loads = Counter(found.choose(0.0) for _ in range(30))
    assert set(loads.values()) == {10}


def test_none_that_is_not_ready_while_another_is() -> None:
    found = replicas("c:1")
    assert {found.choose(0.0) for _ in range(10)} == {"c:1"}


def test_a_returning_server_starts_without_a_pause() -> None:
    """A server that comes back after failures gets requests at once.

    Regression: a server that was killed during three requests came back at once, but got no request for a
    minute.
    """
    found = replicas("a:1", "b:1")
    for _ in range(MAX_FAILURES):
        found.ended("a:1", 0.0, failed=True)
    assert not found.has_other(0.5, than=["b:1"])
    assert found.set_ready("a:1", ready=False)
    assert found.set_ready("a:1", ready=True)
    assert found.has_other(0.5, than=["b:1"])
    assert not found.set_ready("d:1", ready=True)


def test_a_link_that_breaks_every_second_is_ejected() -> None:
    """A server whose connection breaks again and again gets no requests for a time.

    Regression: each new connection cleared the record of a server's failures, so a server that answered nothing got
    every second request.
    """
    found, chosen = replicas("a:1", "b:1"), Counter[str]()
    for second in range(120):
        found.set_ready("b:1", ready=True)
        addresses = [str(found.choose(float(second))) for _ in range(4)]
        found.set_ready("b:1", ready=False)
        for address in addresses:
            found.ended(address, second + 0.9, failed=address == "b:1")
        chosen.update(addresses)
    assert chosen["b:1"] < 40


def test_none_is_ready_and_a_request_finds_out() -> None:
    assert replicas().choose(0.0) in ADDRESSES
    assert Replicas().choose(0.0) is None


def test_failed_servers_are_tried_last_unfit_never() -> None:
    found = replicas(*ADDRESSES)
    assert found.choose(0.0, failed={"a:1", "b:1"}) == "c:1"
    assert found.choose(0.0, failed=set(ADDRESSES)) in ADDRESSES
    assert found.choose(0.0, failed={"a:1"}, unfit={"b:1", "c:1"}) == "a:1"
    assert found.choose(0.0, unfit=set(ADDRESSES)) is None


def test_three_failures_eject_for_a_growing_pause() -> None:
    found, now = replicas(*ADDRESSES), 100.0
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        eject(found, "a:1", now)
        assert "a:1" not in {found.choose(now + pause_s * 0.99) for _ in range(9)}
        now += pause_s
        assert "a:1" in {found.choose(now) for _ in range(9)}


def test_a_pause_is_bounded_and_forgotten() -> None:
    found, now = replicas(*ADDRESSES), 0.0
    for _ in range(20):
        eject(found, "a:1", now)
        pause_s = found.records["a:1"].back_at - now
        now = found.records["a:1"].back_at
    assert pause_s == MAX_PAUSE_S
    found.ended("a:1", now + FORGIVEN_AFTER_S + 1, failed=False)
    eject(found, "a:1", now + FORGIVEN_AFTER_S + 2)
    assert found.records["a:1"].back_at == now + FORGIVEN_AFTER_S + 2 + FIRST_PAUSE_S


def test_a_crowd_that_fails_at_once_is_one_ejection() -> None:
    """Thirty requests that fail at once, as when a server is killed, exclude the server no longer than one failure."""
    found = replicas(*ADDRESSES)
    for _ in range(30):
        found.ended("a:1", 5.0, failed=True)
    assert found.records["a:1"].back_at == 5.0 + FIRST_PAUSE_S


def test_success_between_failures_ejects_no_replica() -> None:
    found = replicas(*ADDRESSES)
    for outcome in (True, True, False, True, None, True):
        found.ended("a:1", 0.0, failed=outcome)
    assert found.records["a:1"].back_at == 0.0


def test_all_are_ejected_and_still_one_is_chosen() -> None:
    found = replicas(*ADDRESSES)
    for address in ADDRESSES:
        eject(found, address, 0.0)
    assert found.choose(0.0) in ADDRESSES
    assert not found.has_other(0.0, than=())


def test_removed_replicas_are_forgotten_and_others_kept() -> None:
    found = replicas(*ADDRESSES)
    found.choose(0.0, unfit={"b:1", "c:1"})
    found.keep(("a:1", "d:1"))
    assert found.records["a:1"].num_outstanding == 1
    assert not found.records["d:1"].ready
    found.ended("b:1", 0.0, failed=True)  # its last request ends after it has left
    assert set(found.records) == {"a:1", "d:1"}


def test_has_other_is_about_those_that_could_answer() -> None:
    found = replicas("a:1", "b:1")
    assert found.has_other(0.0, than={"a:1"})
    assert not found.has_other(0.0, than={"a:1", "b:1"})
    eject(found, "b:1", 0.0)
    assert not found.has_other(0.0, than={"a:1"})


@given(st.text(min_size=1, max_size=20), st.permutations(ADDRESSES))
def test_a_prefix_finds_its_replica_from_every_process(prefix: str, order: list[str]) -> None:
    found, other = replicas(*ADDRESSES), Replicas()
    other.keep(order)
    for record in other.records.values():
        record.ready = True
    chosen = found.choose(0.0, prefix=prefix)
    assert other.choose(0.0, prefix=prefix) == chosen


@given(st.lists(st.sampled_from(["one chat", "another", ""]), max_size=40))
def test_a_prefix_never_unbalances_the_loads(prefixes: list[str]) -> None:
    found = replicas(*ADDRESSES)
    for prefix in prefixes:
        found.choose(0.0, prefix=prefix)
        loads = [record.num_outstanding for record in found.records.values()]
        assert max(loads) - min(loads) <= NEAR + 1


def test_when_its_replica_goes_a_prefix_moves_alone() -> None:
    """When a server goes, only its own conversations move; all others stay where their prefixes are cached."""
    prefixes = [f"chat {number}" for number in range(60)]
    before = {prefix: replicas(*ADDRESSES).choose(0.0, prefix=prefix) for prefix in prefixes}
    after = {prefix: replicas("a:1", "b:1").choose(0.0, prefix=prefix) for prefix in prefixes}
    assert set(before.values()) == set(ADDRESSES)
    assert all(after[prefix] == where for prefix, where in before.items() if where != "c:1")
