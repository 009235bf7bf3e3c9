"""Tests that answers with grammars have the tokens that the target gives without a draft, in every topology.

Servers run in this process, with real sockets and a proxy that can slow or cut the link.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from specdec.comparison.run.proxy import DelayProxy, LinkConditions, delay_proxy
from specdec.grpc_comm.server import Server
from specdec.inference.commit import FinishReason
from specdec.inference.config import ConnectionConfig, DraftConfig, ModelConfig, ProposerConfig
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import EngineLimits
from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import Grammar, GrammarKind, Preamble, SamplingParams, Schedule
from specdec.inference.serving.assembly import load_proposer, target_engine
from specdec.inference.serving.edge import private_draft
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.calls import convert
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.remote import card_of_target
from specdec.inference.workers.completion import CompletionRequest, ModelCard
from specdec.inference.workers.drafting.service import VerificationServicer
from tests.conftest import ModelDirectories
from tests.support.ports import listening
from tests.support.servers import Completion, complete_all, completed_by, cut_for, interrupted, until_attached

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FAR = LinkConditions(rtt_s=0.04, jitter_s=0.01)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Grammar(GrammarKind.REGEX, r"(the|a)+[0-9]{2,4}(in|ing)*"),
    Grammar(GrammarKind.CHOICE, '["the end", "the ending", "other"]'),
    Grammar(GrammarKind.GRAMMAR, 'start: "(" start ")" | /[0-9]{1,3}/'),
)
BEHIND_REASONING = Grammar(GrammarKind.REGEX, "(the|a){9}", Preamble.REASONING)
REASONING_PROMPTS = ("the wind", "the wind <think>")
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=2.0, top_k=20, repetition_penalty=1.2),
)


def some_requests() -> list[CompletionRequest]:
    """Return requests with every kind of grammar, and some without one, to be decoded in the same passes."""
    return [
        CompletionRequest(f"the {i} wind", sampling, seed=i, max_new_tokens=60, grammar=grammar)
        for i, grammar in enumerate((*GRAMMARS, None))
        for sampling in SAMPLINGS
    ] + [
        CompletionRequest(prompt, SAMPLINGS[1], seed=1, max_new_tokens=30, grammar=BEHIND_REASONING)
        for prompt in REASONING_PROMPTS
    ]


def model(path: Path, num_slots: int = 8) -> ModelConfig:
    return ModelConfig(path, num_slots=num_slots, num_threads=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(models: ModelDirectories) -> AsyncGenerator[Server, None]:
    async with target_engine(model(models.target), EngineLimits(64)) as loaded:
        engine, pool = loaded.engine, DraftPool(loaded.engine)
        words = Vocabulary(loaded.tokenizer.fingerprint, engine.vocab_size)
        card = ModelCard("target", "target", 128, words.size, words.fingerprint, model_id="m")
        generation = GenerationServicer(LocalCompleter(pool, loaded.tokenizer, model_id="m"), card)
        async with listening(VerificationServicer(pool, words), generation) as server:
            yield server
            await loaded.engine.stop(grace_s=0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(target: Server) -> list[Completion]:
    """Return the target's answers without draft tokens (gamma 0): even tokens that grammars force are not proposed."""
    return await complete_at(target, [replace(request, gamma=0) for request in some_requests()])


@pytest_asyncio.fixture(loop_scope="module")
async def link(target: Server) -> AsyncGenerator[DelayProxy, None]:
    async with delay_proxy(target.port, LinkConditions()) as proxy:
        yield proxy


async def complete_at(target: Server, requests: Sequence[CompletionRequest]) -> list[Completion]:
    return await complete_all(f"127.0.0.1:{target.port}", requests)


@asynccontextmanager
async def worker(
    draft: Path | None, models: ModelDirectories, link: DelayProxy
) -> AsyncGenerator[FailoverCompleter, None]:
    """Yield a client with a draft worker in this process, connected through `link`.

    The worker uses the model in `draft`; if that is None, it drafts by prompt lookup.
    """
    config = ProposerConfig(draft or models.target, model(draft) if draft else None, num_slots=4, branches=2)
    loaded = await load_proposer(config)
    connection = ConnectionConfig("127.0.0.1", link.port, reconnect_timeout_s=10.0)
    async with connected(connection) as fleet:
        card = await card_of_target(fleet)
        async with private_draft(loaded, config.tokenizer_path, DraftConfig(connection), fleet, card) as running:
            await until_attached(running.worker)
            yield FailoverCompleter(fleet, connection, running.worker.complete)


def answers(completions: Sequence[Completion]) -> list[tuple[list[int], FinishReason | None]]:
    return [(completion.token_ids, completion.reason) for completion in completions]


async def test_a_target_alone_proposes_the_tokens_that_a_grammar_forces(
    target: Server, plain: list[Completion]
) -> None:
    """Without a draft, a target proposes the tokens at places where a grammar allows no other.

    In answers where nothing else is proposed, all of them are accepted.
    """
    forced = await complete_at(target, some_requests())
    assert answers(forced) == answers(plain)
    assert sum(completion.num_accepted_tokens for completion in forced[:3]) > 30
    alone = [completion for completion in forced if not completion.num_lookup_tokens]
    assert all(completion.num_accepted_tokens == completion.num_draft_tokens for completion in alone)
    assert all(completion.num_draft_tokens == 0 for completion in plain)


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.ASYNC])
@pytest.mark.parametrize(
    ("draft", "conditions"),
    [
        pytest.param("related", LinkConditions(), id="related-near"),
        pytest.param("related", FAR, id="related-far"),
        pytest.param("stranger", FAR, id="stranger-far", marks=pytest.mark.release),
        pytest.param("ngram", LinkConditions(), id="ngram-near"),
    ],
)
async def test_distributed_answers_keep_to_their_grammar(
    models: ModelDirectories,
    link: DelayProxy,
    plain: list[Completion],
    schedule: Schedule,
    conditions: LinkConditions,
    draft: str,
) -> None:
    link.conditions = conditions
    async with worker(getattr(models, draft, None), models, link) as completer:
        helped = await completed_by(completer, [replace(each, schedule=schedule) for each in some_requests()])
    assert answers(helped) == answers(plain)
    assert sum(completion.num_accepted_tokens for completion in helped) > 0


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.ASYNC])
async def test_a_cut_link_changes_no_token(
    models: ModelDirectories, link: DelayProxy, plain: list[Completion], schedule: Schedule
) -> None:
    """If the connection between draft worker and target is cut, the answer with a grammar keeps its tokens.

    The worker computes the grammar's state from the committed tokens when it opens a new stream.
    """
    link.conditions = FAR
    async with worker(models.stranger, models, link) as completer:
        request = replace(some_requests()[1], schedule=schedule)
        helped = await interrupted(completer, request, {12: cut_for(link, 0.2)})
    assert answers([helped]) == answers(plain[1:2])


async def test_a_peer_that_ignores_grammars_is_noticed(
    models: ModelDirectories, target: Server, link: DelayProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client refuses the answer of a server that does not know the field for grammars, and so ignores it."""
    monkeypatch.setattr(convert, "_wanted_grammar", lambda _: None)
    with pytest.raises(InvalidRequestError, match="grammar"):
        await complete_at(target, some_requests()[:1])
    async with worker(models.related, models, link) as completer:
        for schedule in Schedule:
            with pytest.raises(InvalidRequestError, match="grammar"):
                await completed_by(completer, [replace(some_requests()[0], schedule=schedule)])
