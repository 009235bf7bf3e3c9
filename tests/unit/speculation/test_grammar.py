"""Grammars in decoders: drafts change no token, forced tokens need no pass of their own, failures end one session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.errors import InternalError
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.model.proposer import Draft, Proposer
from specdec.inference.request import Grammar, GrammarKind, SamplingParams
from specdec.inference.scheduling.draft_length import DraftLength
from specdec.inference.speculation.grammar import Allowed, was_step
from specdec.inference.speculation.lookup import NgramProposer
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from specdec.inference.text.grammar import GrammarMatcher
from tests.support.faults import assert_faults_cost_no_token
from tests.support.grammars import COMPILER, TOKENIZER
from tests.support.models import EOS_TOKEN_ID, tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
PROMPT = [7, 8, 9]
MAX_LENGTH = 120
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=1.3, top_k=1, seed=4),
    SamplingParams(temperature=2.0, top_k=5, top_p=0.9, seed=5),
    SamplingParams(temperature=1.0, min_p=0.3, repetition_penalty=1.3, logit_bias=((40, 5.0), (200, 100.0)), seed=6),
]


def backend(seed: int = 1, num_slots: int = 2) -> TorchBackend:
    return TorchBackend(tiny_model("llama", seed=seed), num_slots=num_slots, max_length=MAX_LENGTH)


class Counting(SlotDecoder):
    """Decoder that counts its passes."""

    num_passes = 0

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        self.num_passes += 1
        return super().step(turns)


def generate(decoder: Any, sampling: SamplingParams, *, gamma: int, grammar: Grammar = GRAMMAR) -> list[int]:
    """Return a whole output under a grammar; decoders that can propose draft tokens use up to `gamma` of them."""
    matcher, tokens, start = COMPILER.compile(grammar), list(PROMPT), 0
    while EOS_TOKEN_ID not in tokens and len(tokens) < MAX_LENGTH - gamma - 1:
        turn = Turn(0, start, list(tokens), sampling, gamma=gamma, output_start=len(PROMPT), grammar=matcher)
        (verdict,) = decoder.step([turn])
        assert verdict.error is None
        start = len(tokens) + verdict.num_accepted_tokens
        tokens += verdict.token_ids
    end = tokens.index(EOS_TOKEN_ID) + 1 if EOS_TOKEN_ID in tokens else len(tokens)
    return tokens[len(PROMPT) : end]


def test_a_step_that_fails_anywhere_costs_no_token() -> None:
    """Wherever a step of a session with a grammar fails, later steps give the tokens that they would have given.

    Regression: an error after a matcher had advanced, but before this was recorded, made later token masks wrong.
    """

    def begun() -> list[Turn]:
        grammar, sampling = COMPILER.compile(GRAMMAR), SamplingParams(temperature=1.5, seed=3)
        return [Turn(0, 0, PROMPT, sampling, output_start=len(PROMPT), grammar=grammar)]

    assert_faults_cost_no_token(
        SlotDecoder(backend()), begun, ("specdec.inference.speculation", "specdec.inference.text")
    )


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("gamma", [1, 9])
def test_tokens_do_not_depend_on_drafts(sampling: SamplingParams, gamma: int) -> None:
    """Tokens under a grammar are those of the target alone, whatever draft and number of draft tokens are used."""
    plain = generate(SlotDecoder(backend()), sampling, gamma=0)
    assert set(json.loads(TOKENIZER.decode(plain))) == {"name", "on"}
    assert generate(SlotDecoder(backend()), sampling, gamma=gamma) == plain
    proposers: list[Proposer] = [
        ModelProposer(backend()),
        ModelProposer(backend(seed=2, num_slots=6), num_branches=2),
        NgramProposer(num_slots=2, max_length=1000),
    ]
    for proposer in proposers:
        for length in (None, DraftLength()):
            decoder = SpeculativeDecoder(SlotDecoder(backend()), proposer, length)
            assert generate(decoder, sampling, gamma=gamma) == plain


def test_forced_tokens_cost_no_pass() -> None:
    """Tokens that a grammar forces need no pass of their own, since they are verified like draft tokens.

    In `{"name":"..."`, the model chooses only the name, its end, and one token in the rest.
    """
    plain, forced = Counting(backend()), Counting(backend())
    output = generate(plain, SAMPLINGS[1], gamma=0)
    assert generate(forced, SAMPLINGS[1], gamma=32) == output
    assert plain.num_passes == len(output)
    assert forced.num_passes <= len(output) - 15


def test_an_ungrammared_proposal_is_cut_and_rejected() -> None:
    """A proposal of a draft that does not know the grammar is cut before the first token that the grammar refuses.

    No logits are computed for the draft tokens from there on.
    """
    decoder, matcher = SlotDecoder(backend()), COMPILER.compile(GRAMMAR)
    proposal = TOKENIZER.encode('{"nonsense and more')
    turn = Turn(0, 0, PROMPT, SamplingParams(), proposal, gamma=20, output_start=len(PROMPT), grammar=matcher)
    (verdict,) = decoder.step([turn])
    assert verdict.num_accepted_tokens < verdict.num_draft_tokens < len(proposal)
    assert TOKENIZER.decode(verdict.token_ids).startswith('{"n')


def test_a_refused_token_makes_room_for_forced() -> None:
    """If the grammar refuses a token of a proposal, tokens that the grammar forces there are proposed instead.

    Regression: the proposal ended before the refused token, without the forced tokens.
    """
    decoder, matcher = SlotDecoder(backend()), COMPILER.compile(GRAMMAR)
    proposal = TOKENIZER.encode('{"nonsense')
    turn = Turn(0, 0, PROMPT, SamplingParams(), proposal, gamma=20, output_start=len(PROMPT), grammar=matcher)
    (verdict,) = decoder.step([turn])
    assert TOKENIZER.decode(verdict.token_ids).startswith('{"name":"')
    assert verdict.own.num_forced_tokens == verdict.own.num_forced_accepted > 0
    verified, accepted = verdict.of_draft
    assert verified == accepted + 1  # the refused one counts against the draft
    assert verdict.num_accepted_tokens == accepted + verdict.own.num_accepted == len(verdict.token_ids) - 1


def test_a_refused_output_ends_one_session_and_no_other() -> None:
    decoder = SlotDecoder(backend())
    bad = Turn(0, 0, [*PROMPT, 200], SamplingParams(), output_start=3, grammar=COMPILER.compile(GRAMMAR))
    good = replace(bad, slot=1, token_ids=PROMPT, grammar=COMPILER.compile(GRAMMAR))
    refused, served = decoder.step([bad, good])
    assert isinstance(refused.error, InternalError)
    assert (refused.token_ids, served.error, len(served.token_ids)) == ((), None, 1)


def test_rows_without_a_grammar_are_not_touched() -> None:
    turns = [Turn(slot, 0, PROMPT, SAMPLINGS[1], output_start=3) for slot in range(2)]
    alone = SlotDecoder(backend()).step(turns)
    beside = SlotDecoder(backend()).step([turns[0], replace(turns[1], grammar=COMPILER.compile(GRAMMAR))])
    assert beside[0] == alone[0]
    assert beside[1] != alone[1]


class NoModel(ModelProposer):
    """Proposer whose draft model fails the test if it runs."""

    def _forward(self, readings: Any) -> Any:
        raise AssertionError("the model was asked")


def test_a_draft_takes_forced_tokens_without_its_model() -> None:
    proposer = NoModel(backend(seed=2))
    matcher: GrammarMatcher = COMPILER.compile(GRAMMAR)
    draft = Draft(0, PROMPT, SamplingParams(), limit=20, output_start=3, grammar=matcher)
    (tokens,) = proposer.extend([draft])
    assert tokens is not None
    assert TOKENIZER.decode([token.token_id for token in tokens]) == '{"name":"'
    assert all(token.is_forced for token in tokens)
    assert not was_step([tokens])
    assert proposer.extend([replace(draft, token_ids=[*PROMPT, 200])]) == [[]]  # can never be right


@pytest.mark.parametrize("device_tokens", [1, 2])
def test_a_draft_proposes_within_the_grammar(device_tokens: int) -> None:
    """The token that a draft model proposes, and its second choice, are allowed by the grammar.

    `device_tokens` is an index of SAMPLINGS: 1, or 2, where top_k is 1 and so there is no second choice.
    """
    proposer, matcher = ModelProposer(backend(seed=2)), COMPILER.compile(Grammar(GrammarKind.REGEX, "(a|b)c"))
    draft = Draft(0, PROMPT, SAMPLINGS[device_tokens], limit=1, output_start=3, grammar=matcher)
    (tokens,) = proposer.extend([draft], ranked=True)
    assert tokens is not None
    within = {TOKENIZER.encode(text)[0] for text in "ab"}
    assert tokens[0].token_id in within
    assert tokens[0].runner_up in {*within, None}
    assert (tokens[0].runner_up is None) == (SAMPLINGS[device_tokens].top_k == 1)


def test_rows_without_a_mask_commit_nothing() -> None:
    """If a row lacks its grammar's mask, the pass commits no token from that row on, since none was checked."""
    allowed = Allowed([b"", b""])
    assert allowed.cut(Verdict((5, 6, 7), num_draft_tokens=3, num_accepted_tokens=2)) == Verdict((5, 6), 3, 1)
    assert allowed.cut(Verdict((5, 6), num_draft_tokens=3, num_accepted_tokens=1)) == Verdict((5, 6), 3, 1)
    assert Allowed().cut(Verdict((5, 6, 7), 3, 2)) == Verdict((5, 6, 7), 3, 2)
