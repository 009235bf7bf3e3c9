"""Draft tokens of requests in an engine core of vLLM: which tokens each pass verifies, and what the reports count."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.request import GenerationRequest, Grammar, GrammarKind, SamplingParams
from specdec.inference.speculation.answers import Origin
from specdec.inference.speculation.lookup import FIRST_TRY, Lookup
from specdec.inference.speculation.tree import Branch
from specdec.inference.vllm.drafts import Drafts
from specdec.inference.vllm.frames import (
    LENGTH,
    Grow,
    Has,
    Help,
    Hold,
    Passed,
    Row,
    ToCore,
    Wanted,
    from_core,
    packed,
    to_core,
)
from specdec.inference.vllm.runner_v1 import chooses, extra_args
from specdec.inference.vllm.translation import KEY, sampling_of

PROMPT = [1, 2, 3]


@pytest.mark.parametrize(
    ("committed", "num_accepted", "counts", "rejected"),
    [
        ([4, 5, 6, 7, 9], 4, (4, 4), []),
        ([4, 5, 9], 2, (4, 2), [6, 7]),
        ([9], 0, (4, 0), [4, 5, 6, 7]),
        ([4, 5], 2, (2, 2), []),  # the second ended the output: it is no rejection of the third
        ([4], 4, (1, 1), []),
    ],
)
def test_drafts_after_an_end_do_not_count(
    committed: list[int], num_accepted: int, counts: tuple[int, int], rejected: list[int]
) -> None:
    drafts = Drafts()
    drafts.enter("a", PROMPT, gamma=4)
    drafts.receive(Help("a", 1))
    drafts.receive(Grow("a", [Branch(None, 3, [4, 5, 6, 7])]))
    row = drafts.passed("a", committed, [4, 5, 6, 7], num_accepted)
    assert (row.position, row.num_tokens) == (3, len(committed))
    assert ((row.num_drafts, row.num_accepted), row.rejected) == (counts, rejected)


def test_padding_of_vllm_counts_as_no_draft_token() -> None:
    """Padding that vLLM puts in place of draft tokens (-1), for a request that waited, counts as no draft token.

    A count below 0 in a report would make the server or pool that reads the report close the connection.
    """
    drafts = Drafts()
    drafts.enter("a", PROMPT, gamma=4)
    drafts.receive(Help("a", 1))
    row = drafts.passed("a", [9], [-1, -1], 0)
    assert (row.num_drafts, row.num_accepted, row.rejected) == (0, 0, [])
    assert from_core(packed(Passed(1, 0, 1, [row]))[LENGTH.size :]) == Passed(1, 0, 1, [row])


def test_draft_tokens_that_only_the_device_knows_are_counted() -> None:
    drafts = Drafts(is_hidden=True)
    drafts.enter("a", PROMPT, gamma=4)
    row = drafts.passed("a", [4, 5, 9], [-1, -1, -1], 2)
    assert (row.num_drafts, row.num_accepted, row.rejected) == (3, 2, [])


def test_a_hold_keeps_the_tree_and_ends_with_its_link() -> None:
    drafts = Drafts()
    drafts.enter("a", PROMPT, gamma=4)
    drafts.receive(Help("a", 1))
    drafts.receive(Grow("a", [Branch(None, 3, [4, 5, 6])]))
    drafts.receive(Hold(is_on=True))
    assert drafts.proposals({"a": 9}, may_wait=True) == [[]]
    drafts.passed("a", [4])
    drafts.receive(Hold(is_on=False))
    assert drafts.proposals({"a": 9}, may_wait=False) == [[5, 6]]
    drafts.receive(Hold(is_on=True))
    drafts.receive(None)
    drafts.receive(Help("a", 2))
    drafts.receive(Grow("a", [Branch(None, 4, [5])]))
    assert drafts.proposals({"a": 9}, may_wait=False) == [[5]]


def test_tokens_before_a_worker_came_are_no_passes_of_plain_decoding_later() -> None:
    drafts = Drafts()
    drafts.enter("a", PROMPT, gamma=4)
    assert [drafts.passed("a", [token_id]).num_plain for token_id in (4, 5, 6)] == [1, 1, 1]
    drafts.receive(Help("a", 1))
    assert drafts.passed("a", [7, 8], [7], 1).num_plain == 2


@given(seed=st.integers(0, 2**32), gamma=st.integers(0, 6), wrong=st.sampled_from([0.0, 0.3, 1.0]))
def test_no_order_of_messages_breaks_a_request(seed: int, gamma: int, wrong: float) -> None:
    """Draft workers come, go and send wrong tokens, and messages are late: the reports of passes still add up.

    `wrong` is the probability that a draft token is wrong.

    Together they have exactly the output's tokens, and the right numbers of draft tokens.
    """
    chance = random.Random(seed)
    output = [chance.randrange(8) for _ in range(60)]
    drafts, help_, done = Drafts(), 0, 0
    drafts.enter("a", PROMPT, gamma)
    while done < len(output):
        match chance.randrange(4):
            case 0:
                help_ += 1
                drafts.receive(Help("a", help_ if chance.random() < 0.8 else None))
            case 1:
                at = max(0, done - chance.randrange(3))  # late, or in time
                believed = [t if chance.random() >= wrong else t + 8 for t in output[at : at + chance.randrange(1, 6)]]
                drafts.receive(Grow("a", [Branch(None, len(PROMPT) + at, believed)] if believed else []))
            case _:
                room = len(output) - done - 1
                (proposal,) = drafts.proposals({"a": room}, may_wait=False)
                assert len(proposal) <= min(gamma, room)
                right = next((i for i, t in enumerate(proposal) if t != output[done + i]), len(proposal))
                row = drafts.passed("a", output[done : done + right + 1], proposal, right)
                assert (row.position, row.num_tokens) == (len(PROMPT) + done, right + 1)
                assert (row.num_drafts, row.num_accepted) == (len(proposal), right)
                assert row.rejected == proposal[right:]
                done += right + 1


ids = st.lists(st.integers(0, 2**31), max_size=5)
counts = st.integers(0, 2**40)
names = st.text(min_size=1, max_size=9)
rows = st.builds(Row, names, counts, counts, counts, counts, counts, counts, counts, ids, st.booleans())
FRAMES_OF_CORES = st.one_of(
    st.builds(Has, names, st.none() | st.builds(Wanted, ids, counts, st.just(7), counts, st.just({"top_k": 3}))),
    st.builds(Passed, counts, counts, counts, st.lists(rows, max_size=3), counts),
)
FRAMES_OF_FRONTS = st.one_of(
    st.builds(Help, names, st.none() | counts),
    st.builds(Grow, names, st.lists(st.builds(Branch, st.none() | counts, counts, ids))),
    st.builds(Hold, st.booleans()),
)


@given(of_core=FRAMES_OF_CORES, of_front=FRAMES_OF_FRONTS)
def test_frames_come_back_from_their_bytes(of_core: Has | Passed, of_front: ToCore) -> None:
    assert from_core(packed(of_core)[LENGTH.size :]) == of_core
    assert to_core(packed(of_front)[LENGTH.size :]) == of_front


@given(
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**64 - 1),
    penalty=st.floats(-2, 2),
    bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-9, 9)), max_size=3, unique_by=lambda pair: pair[0]),
    committed=st.integers(0, 2),
    grammar=st.none() | st.just(Grammar(GrammarKind.REGEX, "[ab]*")),
)
def test_a_request_reads_back_from_its_extra_args(
    temperature: float,
    seed: int,
    penalty: float,
    bias: list[tuple[int, float]],
    committed: int,
    grammar: Grammar | None,
) -> None:
    sampling = SamplingParams(
        temperature=temperature, seed=seed, presence_penalty=penalty, logit_bias=tuple(bias), top_k=3, min_p=0.1
    )
    request = GenerationRequest(
        tuple(PROMPT), sampling, num_committed_tokens=committed, grammar=grammar, stop_at_eos=True
    )
    sent = extra_args(request, "a", gamma=8)
    assert sent[KEY]["output_start"] == len(PROMPT) - committed
    if not chooses(sent):  # greedy
        assert sampling.greedy
        assert not sampling.penalizes
        assert bias == []
    else:
        assert set(sent[KEY]["sampling"]) == {each.name for each in fields(SamplingParams)}
        assert sampling_of(sent[KEY]["sampling"]) == sampling


def ended(drafts: Drafts, name: str, output: list[int]) -> list[Row]:
    """Run the passes of a request until it has this output; return the reports (rows) of these passes."""
    rows, done = [], 0
    while done < len(output):
        (proposal,) = drafts.proposals({name: len(output) - done - 1}, may_wait=True)
        right = next((i for i, t in enumerate(proposal) if t != output[done + i]), len(proposal))
        row = drafts.passed(name, output[done : done + right + 1], proposal, right)
        rows.append(row)
        done += right + 1
    drafts.leave(name)
    return rows


OUTPUT = [*range(50, 110)]


@pytest.mark.parametrize("looks_up", [False, True])
def test_a_prediction_fills_passes_without_a_worker(looks_up: bool) -> None:
    """A right prediction of the output makes passes few and is counted as such; a wrong one changes no token."""
    drafts = Drafts(looks_up=looks_up)
    drafts.enter("a", PROMPT, 16, origin=Origin("one", PROMPT), prediction=OUTPUT)
    rows = ended(drafts, "a", OUTPUT)
    assert len(rows) <= 6
    assert all(row.is_lookup and row.is_predicted for row in rows if row.num_drafts)
    drafts.enter("b", PROMPT, 16, origin=Origin("one", PROMPT), prediction=OUTPUT[::-1])
    rows = ended(drafts, "b", OUTPUT)
    assert sum(row.num_tokens for row in rows) == len(OUTPUT)
    assert sum(row.num_accepted for row in rows) == 0


def test_a_prediction_goes_before_a_worker_that_promises_less() -> None:
    drafts = Drafts(looks_up=True)
    drafts.enter("a", PROMPT, 16, origin=Origin("one", PROMPT), prediction=OUTPUT)
    drafts.receive(Help("a", 1))
    drafts.receive(Grow("a", [Branch(None, 3, [7])]))
    assert drafts.proposals({"a": 40}, may_wait=True) == [OUTPUT[:FIRST_TRY]]


@pytest.mark.parametrize(
    ("owner", "num_bytes", "drafted"), [("one", 1 << 20, True), ("two", 1 << 20, False), ("one", 0, False)]
)
def test_an_answer_is_kept_for_its_owner(owner: str, num_bytes: int, drafted: bool) -> None:
    drafts = Drafts(looks_up=True, num_bytes=num_bytes)
    drafts.enter("a", PROMPT, 16, origin=Origin("one", PROMPT, 5))
    assert not any(row.num_drafts for row in ended(drafts, "a", OUTPUT))
    drafts.enter("b", PROMPT, 16, origin=Origin(owner, PROMPT, 5))
    rows = ended(drafts, "b", OUTPUT)
    assert any(row.num_drafts for row in rows) == drafted
    assert not any(row.is_predicted for row in rows)


def test_whole_proposals_of_all_requests_keep_one_width() -> None:
    """If each request's worker has sent gamma or more draft tokens, the pass verifies gamma tokens of each.

    vLLM's runner V2 captures full CUDA graphs only for passes in which every request has 1 + gamma tokens.
    """
    drafts, gamma = Drafts(), 4
    for name in "abc":
        drafts.enter(name, PROMPT, gamma)
        drafts.receive(Help(name, 1))
        drafts.receive(Grow(name, [Branch(None, 3, [*range(4, 10)])]))
    for num_drafts in (0, 4, 8, 12):
        drafts.timed(3, num_drafts, 0.020 + 0.0001 * num_drafts)  # draft tokens cost little
    assert [len(proposal) for proposal in drafts.proposals(dict.fromkeys("abc", 9), may_wait=True)] == [gamma] * 3


@pytest.mark.parametrize(("num_requests", "dear", "most"), [(16, True, 30), (16, False, 100), (1, True, 100)])
def test_lookups_become_rare_where_many_requests_verify_none(
    num_requests: int, dear: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If tokens cost more than they gain, 16 requests look tokens up in one of 5 passes; a single request in every one.

    A request with a prediction looks tokens up in every pass.
    """
    drafts, looked = Drafts(looks_up=True), Counter[int]()
    names, propose = list(map(str, range(num_requests))), Lookup.propose

    def counted(lookup: Lookup, token_ids: Sequence[int], limit: int, num_tokens: int | None = None) -> list[int]:
        looked[id(lookup)] += 1
        return propose(lookup, token_ids, limit, num_tokens)

    for name in names:
        drafts.enter(name, PROMPT * 5, 16)
    drafts.enter("predicted", PROMPT, 16, origin=Origin("one", PROMPT), prediction=OUTPUT)
    for num_drafts in (0, 4, 16, 64, 300):
        for _ in range(5):
            drafts.timed(num_requests, num_drafts, 0.02 * (1 + num_drafts * dear / 8))
    monkeypatch.setattr(Lookup, "propose", counted)
    for place in range(100):
        drafts.proposals(dict.fromkeys([*names, "predicted"], 400), may_wait=False)
        for name in [*names, "predicted"]:
            drafts.passed(name, [PROMPT[place % 3]])
    numbers = sorted(looked.values())
    assert numbers[-1] == 100
    assert most * 0.6 <= numbers[0] <= most
