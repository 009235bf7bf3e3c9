"""Count of the passes that decoding without a draft, but with prompt lookup, would have needed for the same text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.commit import OwnDrafts
from specdec.inference.model.decoder import Verdict
from specdec.inference.speculation.sources import Sources
from specdec.inference.tokens import common_length

PROMPT = [1, 2, 3, 4, 5]


def plain_passes(text: list[int], limit: int) -> int:
    """Return the number of passes of decoding `text` without a draft, with lookups of up to `limit` tokens a pass."""
    tokens, num_passes = list(PROMPT), 0
    sources = Sources(tokens, lookup_limit=limit)
    while (place := len(tokens) - len(PROMPT)) < len(text):
        proposal = sources.replay.propose(limit)
        num_accepted = min(common_length(proposal, text[place:]), len(text) - place - 1)
        new = text[place : place + num_accepted + 1]
        tokens += new
        own = OwnDrafts(len(proposal), num_accepted)
        sources.record(Verdict(tuple(new), len(proposal), num_accepted, own=own), 0.0)
        assert sources.num_plain == 1
        num_passes += 1
    return num_passes


def replayed(text: list[int], limit: int, rng: random.Random) -> int:
    """Return how many passes without a draft are counted while `text` is committed in pieces, as with draft tokens."""
    tokens, counted = list(PROMPT), 0.0
    sources = Sources(tokens, lookup_limit=limit)
    while (place := len(tokens) - len(PROMPT)) < len(text):
        new = text[place : place + rng.randint(1, 8)]
        tokens += new
        sources.record(Verdict(tuple(new), len(new), len(new) - 1), 0.0)
        counted += sources.num_plain
    return round(counted)


def test_a_lookup_goes_before_draft_tokens_that_promise_less() -> None:
    tokens = PROMPT * 4
    sources = Sources(tokens, lookup_limit=8)
    assert len(sources.preferred(8, 4)) == 0, "nothing is known of the text yet"
    for _ in range(4):
        proposal = sources.replay.propose(8)
        tokens += [*proposal, PROMPT[len(tokens + proposal) % len(PROMPT)]]
        verdict = Verdict((*proposal, tokens[-1]), len(proposal), len(proposal))
        sources.record(replace(verdict, own=OwnDrafts(len(proposal), len(proposal))), 0.0)
    assert len(sources.preferred(8, 4)) == 8
    assert sources.preferred(1, 8) == [], "one token, beside eight"
    assert Sources(tokens, lookup_limit=0).preferred(8, 4) == [], "lookup is off"


@pytest.mark.parametrize("limit", [0, 1, 8])
@given(st.lists(st.integers(6, 9), min_size=1, max_size=120), st.randoms(use_true_random=False))
def test_drafts_do_not_change_the_count(limit: int, text: list[int], rng: random.Random) -> None:
    """The count equals the passes without a draft, or one less: the last pass may not have ended yet."""
    expected = plain_passes(text, limit)
    assert expected - 1 <= replayed(text, limit, rng) <= expected
