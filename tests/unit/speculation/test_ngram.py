"""Prompt lookup: what it proposes has stood behind the same tokens before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.model import Draft
from inference.request import SamplingParams
from inference.speculation.ngram import MAX_MATCH, NgramProposer, lookup

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def reference(token_ids: list[int], limit: int) -> list[int]:
    """The definition, by trying everything: longest suffix first, latest earlier occurrence first."""
    for length in range(min(MAX_MATCH, len(token_ids) - 1), 0, -1):
        suffix = token_ids[-length:]
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == suffix:
                return token_ids[start + length : start + length + limit]
    return []


@given(TOKENS, st.integers(1, 8))
def test_lookup_is_its_definition(token_ids: list[int], limit: int) -> None:
    assert lookup(token_ids, limit) == reference(token_ids, limit)


def test_a_loop_is_continued() -> None:
    assert lookup([1, 2, 3, 1, 2, 3, 1, 2], 3) == [3, 1, 2]


def test_nothing_to_propose() -> None:
    assert lookup([1, 2, 3], 4) == []
    assert lookup([7], 4) == []


def test_batched_as_alone() -> None:
    proposer = NgramProposer(num_slots=4, max_length=100)
    drafts = [Draft(slot, ids, SamplingParams(), limit=3) for slot, ids in enumerate([[1, 2, 1], [5], [4, 4, 4]])]
    assert proposer.extend(drafts) == [[2, 1], [], [4]]
