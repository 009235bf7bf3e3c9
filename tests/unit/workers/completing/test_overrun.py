"""A target that sends more than a request asked for: clients get what they asked for, or an error.

Regression: nothing limited an answer to what was asked for. From a target that never ended, a draft passed on 185,500
tokens for a request of 150, and 900,000 of one commit. Converting these stopped the draft's event loop for
seconds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
import httpx
import pytest

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.commit import Delta, OwnDrafts
from specdec.inference.config import ConnectionConfig
from specdec.inference.errors import InvalidRequestError, UnavailableError
from specdec.inference.gateway.app import create_app
from specdec.inference.speculation.tree import MAX_TREE_TOKENS
from specdec.inference.workers.calls.convert import card_to_message
from specdec.inference.workers.calls.fleet import Fleet
from specdec.inference.workers.completing import resuming
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.resuming import MAX_BARREN_RESUMES
from specdec.inference.workers.completion import Completer, CompletionRequest
from tests.support.completers import CARD, gateway
from tests.support.edges import edge
from tests.support.ports import listening
from tests.support.scripted import token_at, tokens_at

PROMPT = (1, 2, 3)
NUM_TOKENS = 6
WHOLE = tokens_at(len(PROMPT), NUM_TOKENS)
SCORE = pb.TokenLogprobs(chosen=pb.TokenLogprob(token_id=60))
Recipe: TypeAlias = Callable[[int, int], Iterator[pb.Delta]]
"""Function from (position, number of requested tokens that are left) to the deltas that a target sends from there."""


def one_by_one(position: int, numbers: Iterator[int] | range) -> Iterator[pb.Delta]:
    for number in numbers:
        yield pb.Delta(position=position + number, token_ids=[token_at(min(position + number, 900))])


def honest(position: int, left: int) -> Iterator[pb.Delta]:
    *others, last = one_by_one(position, range(left))
    last.finish_reason = pb.FINISH_REASON_LENGTH
    yield from (*others, last)


def endless(position: int, left: int) -> Iterator[pb.Delta]:
    return one_by_one(position, itertools.count())


def unfinished(position: int, left: int) -> Iterator[pb.Delta]:
    """Return deltas of all tokens that are left, without a finish reason in the last one."""
    return one_by_one(position, range(left))


def one_too_many(position: int, left: int) -> Iterator[pb.Delta]:
    yield pb.Delta(position=position, token_ids=[60] * (left + 1), finish_reason=pb.FINISH_REASON_LENGTH)


def empty(position: int, left: int) -> Iterator[pb.Delta]:
    return (pb.Delta(position=position) for _ in itertools.count())


def huge(position: int, left: int) -> Iterator[pb.Delta]:
    yield pb.Delta(position=position, token_ids=[60] * 900_000)


def scored(position: int, left: int) -> Iterator[pb.Delta]:
    yield pb.Delta(position=position, token_ids=[60], logprobs=[SCORE] * 200_000)


def alternatives(position: int, left: int) -> Iterator[pb.Delta]:
    score = pb.TokenLogprobs(chosen=SCORE.chosen, top=[SCORE.chosen] * 200_000)
    yield pb.Delta(position=position, token_ids=[60], logprobs=[score])


def prompt_scores(position: int, left: int) -> Iterator[pb.Delta]:
    """Yield nothing; for this recipe `Target` itself sends scores of far more tokens than the prompt has."""
    yield from ()


def boasting(position: int, left: int) -> Iterator[pb.Delta]:
    """Yield the right deltas, but each with counts of 80 million draft tokens."""
    for commit in honest(position, left):
        for name in BOASTS:
            setattr(commit, name, 80_000_000)
        yield commit


BOASTS = ("num_draft_tokens", "num_accepted_tokens", "num_lookup_tokens", "num_lookup_accepted")
HOSTILE: dict[Recipe, tuple[int, str]] = {
    endless: (NUM_TOKENS - 1, "tokens came without an end, the limit is"),
    unfinished: (NUM_TOKENS - 1, "tokens came without an end, the limit is"),
    one_too_many: (0, "7 tokens came, the limit is 6"),
    empty: (0, "without an end, the limit is 6"),
    huge: (0, "token_ids has 900000 elements, the limit is 257"),
    scored: (0, "logprobs has 200000 elements, the limit is 257"),
    alternatives: (0, r"logprobs.top has 200000 elements, the limit is 20"),
    prompt_scores: (0, "prompt_logprobs has 200000 elements, and none were asked for"),
}
"""Recipes of bad targets, each with (number of tokens that clients still get, pattern of their error)."""


class Target(rpc.GenerationServiceServicer, rpc.VerificationServiceServicer):  # type: ignore[misc]
    """Target that answers each request by the next one of `recipes`; the last one is for all further requests."""

    service_name = "specdec.v1.GenerationService"
    max_request_bytes = 10_000

    def __init__(self, *recipes: Recipe, text: str = "") -> None:
        self.recipes = list(recipes)
        self._text = text
        self.num_asked = 0

    def add_to(self, server: Any) -> None:
        rpc.add_VerificationServiceServicer_to_server(self, server)
        rpc.add_GenerationServiceServicer_to_server(self, server)

    async def Assist(self, _: object, context: Any) -> None:
        await context.read()
        await context.write(pb.AssistResponse(attached=pb.Attached(worker_id="w")))
        while await context.read() is not grpc.aio.EOF:
            pass

    async def Generate(self, asked: pb.GenerateRequest, context: Any) -> None:
        self.num_asked += 1
        recipe = self.recipes.pop(0) if len(self.recipes) > 1 else self.recipes[0]
        done = len(asked.committed_token_ids.ids)
        limit = asked.max_new_tokens if asked.HasField("max_new_tokens") else NUM_TOKENS
        scores = [SCORE] * 200_000 if recipe is prompt_scores else []
        defaults = pb.RequestDefaults(max_new_tokens=NUM_TOKENS)
        started = pb.Started(
            num_prompt_tokens=len(scores) or len(PROMPT), model_id="m", prompt_logprobs=scores, defaults=defaults
        )
        await context.write(pb.GenerateResponse(started=started))
        for delta in recipe(len(PROMPT) + done, limit - done):
            delta.text = self._text
            await context.write(pb.GenerateResponse(delta=delta))
        await context.write(pb.GenerateResponse(finished=pb.GenerationFinished(reason=pb.FINISH_REASON_LENGTH)))

    async def GetModel(self, _: object, context: Any) -> pb.GetModelResponse:
        return card_to_message(CARD)


@asynccontextmanager
async def asked_by_client(target: Target) -> AsyncGenerator[Completer, None]:
    """Yield a completer that sends requests to `target` without a draft, as gateways and `fused_client` do."""
    async with listening(target) as server, client_of(server.port) as completer:
        yield completer


@asynccontextmanager
async def fleet_of(port: int) -> AsyncGenerator[Fleet, None]:
    """Yield the connections to one server once it is ready, since before that a failed request is not sent again."""
    async with Fleet([f"127.0.0.1:{port}"]) as fleet:
        async with asyncio.timeout(60), aclosing(fleet.serves()) as changes:
            async for serves in changes:
                if serves:
                    break
        yield fleet


@asynccontextmanager
async def client_of(port: int) -> AsyncGenerator[Completer, None]:
    async with fleet_of(port) as fleet:
        yield FailoverCompleter(fleet, ConnectionConfig("127.0.0.1", port))


@asynccontextmanager
async def asked_by_draft(target: Target) -> AsyncGenerator[Completer, None]:
    """Yield a completer with a draft worker in this process that drafts for the requests it sends to `target`."""
    async with listening(target) as server, edge(server.port) as client:
        yield client.completer


@asynccontextmanager
async def asked_by_serving_draft(target: Target) -> AsyncGenerator[Completer, None]:
    """Yield a client of a draft that serves requests: the draft drafts for them and sends them on to `target`."""
    async with (
        asked_by_draft(target) as draft,
        listening(GenerationServicer(draft, CARD)) as server,
        client_of(server.port) as completer,
    ):
        yield completer


ASKED_BY = (asked_by_client, asked_by_draft, asked_by_serving_draft)
REQUEST = CompletionRequest(PROMPT, seed=1, max_new_tokens=NUM_TOKENS)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "REDIAL_S", 0.001)


async def read(completer: Completer, seen: list[int], request: CompletionRequest = REQUEST) -> None:
    async with asyncio.timeout(60):
        async for event in completer.complete(request):
            if isinstance(event, Delta):
                seen.extend(event.token_ids)


@pytest.mark.parametrize("asked_by", ASKED_BY)
@pytest.mark.parametrize("recipe", HOSTILE)
async def test_a_surplus_is_an_error_and_an_honest_target_goes_on(recipe: Recipe, asked_by: Any) -> None:
    num_good, words = HOSTILE[recipe]
    target, honestly, seen = Target(recipe, honest), list[int](), list[int]()
    async with asked_by(target) as completer:
        await read(completer, honestly)
        assert (honestly, target.num_asked > 1) == (WHOLE, True)
        target.recipes, target.num_asked = [recipe], 0
        with pytest.raises(UnavailableError, match=words):
            await read(completer, seen)
    assert seen == WHOLE[:num_good]
    assert target.num_asked <= NUM_TOKENS + MAX_BARREN_RESUMES  # each stream gives a token, or is one of the barren


async def test_an_open_length_takes_the_servers_default() -> None:
    seen: list[int] = []
    async with asked_by_client(Target(endless)) as completer:
        with pytest.raises(UnavailableError, match="the limit is 6"):
            await read(completer, seen, CompletionRequest(PROMPT, seed=1, max_new_tokens=None))
    assert seen == WHOLE[:-1]


@pytest.mark.parametrize(
    ("num_characters", "error", "words"),
    [
        (1_000_000, UnavailableError, "text has 1000000 elements, the limit is 263168"),
        (5_000_000, InvalidRequestError, "a message of the answer is too long"),
    ],
)
async def test_a_text_that_no_pass_could_make_is_refused(
    num_characters: int, error: type[Exception], words: str
) -> None:
    """A server's message whose text is longer than any pass can make is refused, with an error about the answer.

    Regression: gRPC has one error for messages too long in both directions, so a client was told that its
    request was too long.
    """
    async with asked_by_client(Target(honest, text="x" * num_characters)) as completer:
        with pytest.raises(error, match=words):
            await read(completer, [])


@pytest.mark.parametrize("asked_by", ASKED_BY)
async def test_counts_of_a_server_are_those_that_a_pass_can_have(asked_by: Any) -> None:
    """Counts of draft tokens that a server sends are reduced to what a pass can have.

    `asked_by` is one of ASKED_BY, which make a client of the server.

    Regression: a count in a target's message of 30 bytes became a list of 80 million numbers, and stopped a
    gateway for 7 s.
    """
    async with asked_by(Target(boasting)) as completer:
        deltas = [event async for event in completer.complete(REQUEST) if isinstance(event, Delta)]
        counts = [(each.num_draft_tokens, each.num_accepted_tokens, each.own) for each in deltas]
        assert counts == [(MAX_TREE_TOKENS, 1, OwnDrafts(MAX_TREE_TOKENS, 1))] * NUM_TOKENS
        transport = httpx.ASGITransport(create_app(gateway(completer)))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            body = {"prompt": list(PROMPT), "max_tokens": NUM_TOKENS}
            for streaming in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
                answer = await client.post("/v1/completions", json={**body, **streaming})
                assert answer.status_code == 200
                assert len(answer.content) < 10_000
