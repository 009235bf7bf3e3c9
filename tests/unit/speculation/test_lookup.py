"""Prompt lookup proposes the tokens that followed the same text earlier, as many as were worth verifying before."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.model.proposer import Draft
from specdec.inference.request import SamplingParams
from specdec.inference.speculation.lookup import FIRST_TRY, MATCHES, Guide, Lookup, NgramProposer, OwnText, continuation
from specdec.inference.speculation.suffix_index import LONGEST_MATCH, MAX_STEPS
from specdec.inference.tokens import TokenView
from tests.support.scripted import ids_of

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=MAX_STEPS - 2)
SHORT = st.lists(st.integers(0, 3), min_size=1, max_size=4)


def reference(token_ids: list[int], limit: int) -> list[int]:
    """Return what prompt lookup should find: the tokens after the latest earlier occurrence of the longest suffix."""
    for length in (*range(LONGEST_MATCH, MATCHES[0] - 1, -1), MATCHES[1]):
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


@given(SHORT, st.lists(st.tuples(SHORT, SHORT), max_size=6), st.integers(1, 8))
def test_a_grown_index_equals_a_new_one(log: list[int], steps: list[tuple[list[int], list[int]]], limit: int) -> None:
    """An index that grows with its sequence finds what an exhaustive search finds, and leaves out draft tokens."""
    text = OwnText()
    proposer = NgramProposer(num_slots=1, max_length=1000)
    for committed, drafts in steps:
        log += committed
        text.read(log, len(log) - 1)
        end, length = text.find(log, len(log))
        found = continuation(log, end, limit, len(log)) if end else []
        view = TokenView(log)
        assert ids_of(proposer.extend([Draft(0, view, SamplingParams(), limit)])) == [found] == [reference(log, limit)]
        assert log[end - length : end] == log[len(log) - length :]
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
    """In text that does not repeat, prompt lookup soon proposes few tokens; after a pause it proposes more again."""
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
    lookup.propose([*PERIOD * 3], 4)
    assert lookup.rate > 0.5 > 0.05 > poor


TEXT = [each % 50 + 100 for each in range(0, 5 * 40, 3)]


def guided(output: list[int], prediction: list[int]) -> list[list[int]]:
    """Return, for each token of an output, the draft tokens that `prediction` gives before it."""
    guide, log, found = Guide.predicted(prediction, 2), [1, 2], []
    for each in output:
        found.append(guide.propose(log, len(log), 4)[0])
        log.append(each)
    return found


def test_a_right_prediction_is_followed_to_its_end() -> None:
    assert guided(TEXT, TEXT) == [TEXT[i : i + 4] for i in range(len(TEXT))]


def test_one_other_token_leaves_the_place() -> None:
    """If the output has another token in place of one of the prediction's, the tokens after it are proposed at once."""
    output = [*TEXT[:20], 7, *TEXT[21:]]
    found = guided(output, TEXT)
    assert found[21:] == [TEXT[i : i + 4] for i in range(21, len(TEXT))]


def test_the_place_is_found_again_after_tokens_that_are_new_or_left_out() -> None:
    for output in ([*TEXT[:20], 7, 8, 9, *TEXT[20:]], [*TEXT[:20], *TEXT[25:]]):
        found = guided(output, TEXT)
        assert [each for each in found[-20:] if each] == [TEXT[i : i + 4] for i in range(len(TEXT) - 20, len(TEXT))]


def test_the_nearest_of_equal_places_is_taken() -> None:
    """If a prediction has many similar lines and the output adds a line, the next line is proposed, not the last."""
    lines = [[10, 11, 12, 13, each] for each in range(20, 30)]
    prediction = [token for line in lines for token in line]
    output = [*prediction[:15], 5, 6, *prediction[15:25]]
    assert guided(output, prediction)[-5:] == [prediction[i : i + 4] for i in range(20, 25)]


def test_a_useless_prediction_is_soon_left() -> None:
    """After a few rejections a prediction proposes little, and the sequence's own text is looked up instead."""
    lookup = Lookup([Guide.predicted([5] * 100, 16)])
    log = PERIOD * 2
    sources = []
    for step in range(30):
        found = lookup.propose(log, 16)
        sources.append(lookup.is_prediction)
        right = found == (PERIOD * 40)[len(log) : len(log) + len(found)]
        lookup.record(len(found), len(found) * right)
        log.append((PERIOD * 40)[16 + step])
    assert sources[0]
    assert not any(sources[5:])


def test_a_right_prediction_grows_wide() -> None:
    lookup, output = Lookup([Guide.predicted(TEXT * 20, 1)]), TEXT * 20
    log, widths = [1], []
    while len(log) < 600:
        found = lookup.propose(log, 64)
        assert found == output[len(log) - 1 :][: len(found)]
        assert lookup.is_prediction
        lookup.record(len(found), len(found))
        log += output[len(log) - 1 :][: len(found) + 1]
        widths.append(len(found))
    assert widths[0] == FIRST_TRY
    assert widths[1] > 16
    assert max(widths) == 64
