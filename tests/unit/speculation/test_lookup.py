"""Prompt lookup proposes tokens that followed the same text earlier, as many as earlier verdicts justify."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.model.proposer import Draft
from specdec.inference.request import SamplingParams
from specdec.inference.speculation.lookup import MATCHES, Lookup, NgramIndex, NgramProposer, continuation, match_length
from specdec.inference.tokens import TokenView
from tests.support.scripted import ids_of

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def reference(token_ids: list[int], limit: int) -> list[int]:
    """Return what prompt lookup should find: what followed the latest earlier occurrence of the longest suffix."""
    for length in MATCHES:
        suffix = token_ids[-length:]
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == suffix:
                grown = list(token_ids)
                for place in range(start + length, start + length + limit):
                    grown.append(grown[place])
                return grown[len(token_ids) :]
    return []


def lookup(token_ids: list[int], limit: int) -> list[int] | None:
    proposer = NgramProposer(num_slots=1, max_length=100)
    (found,) = ids_of(proposer.extend([Draft(0, token_ids, SamplingParams(), limit)]))
    return found


@given(TOKENS, st.integers(1, 8))
def test_lookup_is_its_definition(token_ids: list[int], limit: int) -> None:
    assert lookup(token_ids, limit) == reference(token_ids, limit)


@given(TOKENS, st.lists(st.tuples(TOKENS, TOKENS), max_size=6), st.integers(1, 8))
def test_a_grown_index_equals_a_new_one(log: list[int], steps: list[tuple[list[int], list[int]]], limit: int) -> None:
    """An index that grows with the sequence finds what an exhaustive search finds, and ignores draft tokens."""
    index = NgramIndex()
    proposer = NgramProposer(num_slots=1, max_length=1000)
    for committed, drafts in steps:
        log += committed
        index.read(log, len(log) - 1)
        end = index.find(log, len(log))
        found = [] if end is None else continuation(log, end, limit, len(log))
        view = TokenView(log)
        assert ids_of(proposer.extend([Draft(0, view, SamplingParams(), limit)])) == [found] == [reference(log, limit)]
        if end is not None:
            assert (
                log[end - match_length(log, end, len(log)) : end] == log[len(log) - match_length(log, end, len(log)) :]
            )
        proposer.extend([Draft(0, TokenView(log, tail=drafts), SamplingParams(), limit)])


def test_batched_as_alone() -> None:
    proposer = NgramProposer(num_slots=4, max_length=100)
    drafts = [Draft(slot, ids, SamplingParams(), limit=3) for slot, ids in enumerate([[1, 2, 1], [5], [4, 4, 4]])]
    assert ids_of(proposer.extend(drafts)) == [[2, 1, 2], [], [4, 4, 4]]


def test_another_sequence_in_the_slot() -> None:
    proposer = NgramProposer(num_slots=1, max_length=100)
    for ids, expected in (([1, 2, 1], [2]), ([1, 3, 1], [3]), ([1, 3, 4], [])):
        assert ids_of(proposer.extend([Draft(0, ids, SamplingParams(), limit=1)])) == [expected]


PERIOD = [3, 1, 4, 1, 5, 9, 2, 6]


def test_right_lookups_grow_longer() -> None:
    lookup, log = Lookup(), PERIOD * 3
    proposal = lookup.propose(log, 16)
    for _ in range(9):
        lookup.record(len(proposal), len(proposal))
        log += [*proposal, (PERIOD * 40)[len(log) + len(proposal)]]
        proposal = lookup.propose(log, 16)
        assert proposal == (PERIOD * 40)[len(log) : len(log) + len(proposal)]
    assert len(proposal) == 16


def test_hopeless_ways_are_hardly_tried() -> None:
    """Prompt lookup soon proposes little for text that does not repeat; after a pause it tries again."""
    rng, lookup, num_tried = random.Random(0), Lookup(), 0
    log = [rng.randrange(20) for _ in range(50)]
    for _ in range(400):
        proposal = lookup.propose(log, 16)
        tries = proposal if lookup.rate > 0.05 else []
        num_tried += len(tries)
        lookup.record(len(tries), 0)
        log.append(rng.randrange(20))
    assert 0 < num_tried < 400 * 0.3
    rate = lookup.rate
    for _ in range(300):
        lookup.record(0, 0)
    assert lookup.rate > rate


def test_a_match_is_judged_by_its_length() -> None:
    lookup = Lookup()
    log = [1, 2, 3, 1]
    for _ in range(20):
        lookup.propose(log, 4)
        lookup.record(4, 0)
    poor = lookup.rate
    lookup.propose([*PERIOD, *PERIOD], 4)
    assert lookup.rate > 0.5 > 0.05 > poor
