"""Prompt lookup: what it proposes has stood behind the same tokens before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.model.proposer import Draft
from inference.request import SamplingParams
from inference.speculation.ngram import MATCHES, NgramIndex, NgramProposer, continuation, match_length
from inference.tokens import TokenView
from tests.support.scripted import ids_of

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def reference(token_ids: list[int], limit: int) -> list[int]:
    """The definition, by trying everything: longest suffix first, latest earlier occurrence first."""
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
def test_an_index_that_grows_finds_what_a_new_one_does(
    log: list[int], steps: list[tuple[list[int], list[int]]], limit: int
) -> None:
    """However the sequence came to be; drafts behind it are looked up, and never become a part of it."""
    index = NgramIndex()
    proposer = NgramProposer(num_slots=1, max_length=1000)
    for committed, drafts in steps:
        log += committed
        index.read(log, len(log) - 1)
        end = index.find(log)
        found = [] if end is None else continuation(log, end, limit)
        view = TokenView(log)
        assert ids_of(proposer.extend([Draft(0, view, SamplingParams(), limit)])) == [found] == [reference(log, limit)]
        if end is not None:
            assert log[end - match_length(log, end) : end] == log[len(log) - match_length(log, end) :]
        proposer.extend([Draft(0, TokenView(log, tail=drafts), SamplingParams(), limit)])


def test_a_loop_is_continued_beyond_its_end() -> None:
    assert lookup([1, 2, 3, 1, 2, 3, 1, 2], 3) == [3, 1, 2]
    assert lookup([1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_to_propose() -> None:
    assert lookup([1, 2, 3], 4) == []
    assert lookup([7], 4) == []


def test_batched_as_alone() -> None:
    proposer = NgramProposer(num_slots=4, max_length=100)
    drafts = [Draft(slot, ids, SamplingParams(), limit=3) for slot, ids in enumerate([[1, 2, 1], [5], [4, 4, 4]])]
    assert ids_of(proposer.extend(drafts)) == [[2, 1, 2], [], [4, 4, 4]]


def test_another_sequence_in_the_slot() -> None:
    proposer = NgramProposer(num_slots=1, max_length=100)
    for ids, expected in (([1, 2, 1], [2]), ([1, 3, 1], [3]), ([1, 3, 4], [])):
        assert ids_of(proposer.extend([Draft(0, ids, SamplingParams(), limit=1)])) == [expected]
