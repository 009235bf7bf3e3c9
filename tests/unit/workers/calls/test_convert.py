"""gRPC messages are converted to dataclasses and back without a change; unset fields mean what the .proto says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.commit import (
    Commit,
    Counts,
    Delta,
    Finished,
    FinishReason,
    OwnDrafts,
    Started,
    Timings,
    TokenLogprobs,
)
from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import (
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    NO_DEFAULTS,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Preamble,
    RequestDefaults,
    SamplingParams,
    Schedule,
    SeedScope,
)
from specdec.inference.speculation.tree import MAX_TREE_TOKENS
from specdec.inference.text.chat import Chat, ChatMessage
from specdec.inference.text.grammar_source import written_out
from specdec.inference.workers.calls import convert
from specdec.inference.workers.completion import CompletionRequest, ModelCard

token_ids = st.lists(st.integers(0, 2**20), max_size=5).map(tuple)
counts = st.integers(0, 2**20)
lengths = st.integers(2, 2**20)  # of prompts: no fewer than `scores` has
microseconds = st.integers(0, 2**50)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=counts,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, MAX_SEED),
)
timings = st.builds(Timings, *[microseconds] * 5)
looked_up = st.builds(OwnDrafts, num_lookup_tokens=counts, num_lookup_accepted=counts, is_predicted=st.booleans())
figures = st.builds(Counts, *[counts] * 6)
scores = st.lists(
    st.builds(TokenLogprobs, st.tuples(counts, counts), st.tuples(st.floats(-9, 0), st.floats(-9, 0))), max_size=2
).map(tuple)


def possible(piece: Commit) -> Commit:
    """Return a commit whose counts of draft tokens are reduced to ones that a pass can have."""
    num_draft = piece.num_draft_tokens % (MAX_TREE_TOKENS + 1)
    num_accepted = piece.num_accepted_tokens % (min(num_draft, len(piece.token_ids)) + 1)
    num_lookup, num_lookup_accepted = piece.own.num_lookup_tokens, piece.own.num_lookup_accepted
    own = OwnDrafts(num_lookup % (num_draft + 1), num_lookup_accepted % (num_accepted + 1))
    own = replace(own, is_predicted=piece.own.is_predicted and isinstance(piece, Delta))  # of no use to draft workers
    return replace(piece, num_draft_tokens=num_draft, num_accepted_tokens=num_accepted, own=own)


schedules = st.sampled_from([None, Schedule.SYNC, Schedule.ASYNC])  # LOAD goes as none
chats = st.builds(Chat, st.lists(st.builds(ChatMessage), min_size=1).map(tuple), st.text(), st.text())
preambles = st.sampled_from([Preamble.NONE, Preamble.REASONING])
gammas = st.one_of(st.none(), st.integers(1, 64))


@given(
    st.builds(
        CompletionRequest,
        prompt=st.one_of(st.text(), token_ids, chats),
        sampling=sampling,
        seed=st.one_of(st.none(), st.integers(0, MAX_SEED)),
        seed_scope=st.sampled_from(SeedScope),
        max_new_tokens=st.integers(1, 2**20),
        stop_token_ids=st.frozensets(counts, max_size=3),
        ignore_eos=st.booleans(),
        gamma=st.one_of(st.none(), st.integers(0, 64)),
        schedule=schedules,
        min_new_tokens=counts,
        prompt_logprobs=st.one_of(st.none(), st.integers(0, 20)),
        grammar=st.one_of(st.none(), st.builds(Grammar, st.sampled_from(GrammarKind), st.text(min_size=1), preambles)),
        cache_salt=st.text(max_size=9),
        draft_session=st.sampled_from(["", "0123456789abcdef" * 2]),
        include_rejected=st.booleans(),
        prediction=st.text(max_size=9),
    )
)
def test_a_completion_request_survives_its_message(request: CompletionRequest) -> None:
    back = convert.completion_from_message(convert.completion_to_message(request))
    unseeded = replace(back.sampling, seed=request.sampling.seed)  # the request's own seed counts
    assert replace(back, sampling=unseeded) == request


@given(
    st.builds(
        GenerationRequest,
        prompt_token_ids=st.lists(counts, min_size=3, max_size=6).map(tuple),
        sampling=sampling,
        max_new_tokens=st.integers(1, 2**20),
        stop_token_ids=st.frozensets(counts, max_size=3),
        gamma=gammas,
        schedule=schedules,
        num_committed_tokens=st.integers(0, 2),
        min_new_tokens=counts,
        cache_salt=st.text(max_size=9),
    )
)
def test_an_opening_survives_its_message(request: GenerationRequest) -> None:
    message = convert.open_to_message(request, fingerprint="f", vocab_size=9)
    assert (message.protocol_version, message.tokenizer_fingerprint, message.vocab_size) == (
        convert.PROTOCOL_VERSION,
        "f",
        9,
    )
    assert convert.open_from_message(message) == request
    predicted = replace(request, prediction=(1, 2, 3))
    assert convert.open_to_message(predicted, fingerprint="f", vocab_size=9) == message  # no worker gets a prediction


@given(
    st.builds(
        Commit,
        position=lengths,
        token_ids=token_ids,
        num_draft_tokens=counts,
        num_accepted_tokens=counts,
        timings=timings,
        counts=figures,
        finish_reason=st.sampled_from([None, *FinishReason]),
        own=looked_up,
        num_received_tokens=counts,
        hold_us=microseconds,
    ).map(possible)
)
def test_a_commit_survives_its_message(commit: Commit) -> None:
    assert convert.commit_from_message(convert.commit_to_message(commit)) == commit


@given(
    st.one_of(
        st.builds(
            Started,
            num_prompt_tokens=lengths,
            seed=st.integers(0, MAX_SEED),
            prompt_logprobs=scores,
            num_cached_tokens=counts,
        ),
        st.builds(
            Delta,
            position=lengths,
            token_ids=token_ids,
            text=st.text(),
            rejected_text=st.text(),
            num_draft_tokens=counts,
            num_accepted_tokens=counts,
            timings=timings,
            counts=figures,
            own=looked_up,
            num_received_tokens=counts,
            hold_us=microseconds,
        ).map(possible),
        st.builds(Finished, reason=st.sampled_from(FinishReason)),
    )
)
def test_an_event_survives_its_message(event: Started | Delta | Finished) -> None:
    assert convert.event_from_message(convert.event_to_message(event)) == event


def test_a_preamble_becomes_part_of_the_grammar() -> None:
    """A grammar that may follow reasoning is sent with the reasoning as a part of the grammar's own text.

    So a target of an older version, which does not know the field for reasoning, allows the same tokens.
    """
    grammar = Grammar(GrammarKind.CHOICE, '["a"]', Preamble.REST_OF_REASONING)
    request = GenerationRequest((1,), stop_at_eos=True, grammar=grammar, sampling=SamplingParams())
    message = convert.open_to_message(request, fingerprint="f", vocab_size=9)
    assert (message.grammar.kind, message.grammar.after_reasoning) == (pb.GRAMMAR_KIND_GRAMMAR, False)
    assert "</think>" in message.grammar.text.replace("\\", "")
    assert convert.open_from_message(message).grammar == written_out(grammar)


def test_names_of_a_card_are_short() -> None:
    """The names in a server's description of its model are cut to a maximum length.

    Regression: a target's name of 3 MB, some 200 times in its gateway's /metrics, made that page 609 MB long.
    """
    short = ModelCard("m", "target", 8, 9, "f")
    assert convert.card_from_message(convert.card_to_message(short)) == short
    long = "x" * 1_000_000
    card = ModelCard(long, long, 8, 9, long, model_id=long)
    back = convert.card_from_message(convert.card_to_message(card))
    names = (back.name, back.topology, back.tokenizer_fingerprint, back.model_id)
    assert {*map(len, names)} == {convert.MAX_NAME_CHARACTERS}


def test_unset_fields_get_the_servers_defaults() -> None:
    """Fields that a request leaves out get the server's defaults; without these, it is greedy, of up to 128 tokens."""
    request = convert.completion_from_message(pb.GenerateRequest(text="a"))
    assert request.resolved(NO_DEFAULTS) == CompletionRequest("a")
    operator = RequestDefaults(temperature=0.5, top_k=3, max_new_tokens=7)
    assert request.resolved(operator) == CompletionRequest("a", SamplingParams(0.5, 3), max_new_tokens=7)
    assert request.sampling == SamplingParams()
    assert (request.seed, request.max_new_tokens, request.gamma) == (None, None, None)


def test_fields_set_to_zero_are_set() -> None:
    message = pb.GenerateRequest(text="a", gamma=0, sampling=pb.SamplingParams(seed=0))
    request = convert.completion_from_message(message)
    assert (request.gamma, request.seed) == (0, 0)
    with pytest.raises(InvalidRequestError, match=r"top_p 0\.0"):
        convert.completion_from_message(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(top_p=0)))


@pytest.mark.parametrize("size", [1, 15, 17, 100_000])
def test_a_draft_session_has_one_size(size: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"draft_session has {size} bytes, 16 are expected"):
        convert.completion_from_message(pb.GenerateRequest(text="a", draft_session=bytes(size)))


def test_reasons_of_a_later_version_are_not_guessed() -> None:
    with pytest.raises(InvalidRequestError, match="finish reason 99"):
        convert.reason_from_message(99)  # type: ignore[arg-type]


def test_a_message_of_too_many_branches_is_refused() -> None:
    """A worker's message with too many branches (alternative proposals) is refused.

    Regression: a session kept the 100,000 branches of each message for as long as it lived.
    """
    branch = pb.Branch(prefix_length=1, token_ids=[5])
    assert len(convert.branches_from_message(pb.Propose(branches=[branch] * convert.MAX_BRANCHES_OF_MESSAGE))) > 1
    with pytest.raises(InvalidRequestError, match=f"exceed {convert.MAX_BRANCHES_OF_MESSAGE}"):
        convert.branches_from_message(pb.Propose(branches=[branch] * (convert.MAX_BRANCHES_OF_MESSAGE + 1)))


def test_too_many_stop_tokens_are_refused() -> None:
    """A request with too many stop tokens is refused.

    Regression: a session with two million stop tokens was accepted, and took 130 MB.
    """
    sampling = SamplingParams()
    GenerationRequest((1,), sampling, 4, stop_token_ids=frozenset(range(MAX_STOP_TOKEN_IDS)))
    with pytest.raises(InvalidRequestError, match=f"exceed {MAX_STOP_TOKEN_IDS}"):
        GenerationRequest((1,), sampling, 4, stop_token_ids=frozenset(range(MAX_STOP_TOKEN_IDS + 1)))


@pytest.mark.parametrize("num_tokens", range(64))
def test_lengths_of_proposals_and_commits_tell_little_of_their_tokens(num_tokens: int) -> None:
    propose = pb.Propose(branches=[pb.Branch(parent_node=7, token_ids=[150_000] * num_tokens)])
    proposal = convert.padded(pb.AssistRequest(propose=pb.AssistPropose(session_id="a", propose=propose)))
    commit = pb.AssistCommit(session_id="a", commit=pb.Commit(token_ids=[150_000] * num_tokens))
    for message in (proposal, convert.padded(pb.AssistResponse(commit=commit))):
        assert message.ByteSize() % convert.PAD_BYTES == 0
        assert message.ByteSize() <= num_tokens * 3 + 24 + convert.PAD_BYTES
