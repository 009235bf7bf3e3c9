"""Verification accepts the draft tokens before the first one that differs from the target's own choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.speculation.verify import verify

tokens = st.lists(st.integers(0, 2), max_size=8)


@given(proposal=tokens, chosen=tokens)
def test_commits_keep_the_prefix_and_one_token(proposal: list[int], chosen: list[int]) -> None:
    chosen = [*chosen, *[5] * 9][: len(proposal) + 1]
    verdict = verify(chosen, proposal)
    num_accepted = verdict.num_accepted_tokens
    assert list(verdict.token_ids) == [*proposal[:num_accepted], chosen[num_accepted]]
    assert proposal[:num_accepted] == chosen[:num_accepted]
    assert num_accepted == len(proposal) or proposal[num_accepted] != chosen[num_accepted]
    assert verdict.num_draft_tokens == len(proposal)
    assert list(verdict.rejected_token_ids) == proposal[num_accepted:]


@pytest.mark.parametrize("num_chosen", [0, 2, 4])
def test_needs_a_choice_per_draft_token_and_one_more(num_chosen: int) -> None:
    with pytest.raises(ValueError, match=f"{num_chosen} chosen"):
        verify([1] * num_chosen, [1, 1])
