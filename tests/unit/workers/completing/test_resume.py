"""An answer cut off at any token goes on at another server, with the same text, counts and finish reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from specdec.inference.backends.registry import load_backend
from specdec.inference.commit import Delta, Finished, Started, TextEvent, TokenLogprobs
from specdec.inference.config import ModelConfig
from specdec.inference.engine.grammars import Grammars
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import IncompatibleDraftError, InvalidRequestError, NotFoundError
from specdec.inference.request import Grammar, GrammarKind, RequestDefaults, SamplingParams
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.text.chat import Chat, ChatMessage
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.tokenizer import TextStream, Tokenizer
from specdec.inference.workers.calls.convert import (
    completion_from_message,
    completion_to_message,
    converted,
    event_from_message,
    event_to_message,
)
from specdec.inference.workers.completing import local
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.resuming import Progress
from specdec.inference.workers.completing.writing import with_text
from specdec.inference.workers.completion import CompletionRequest, Resume
from tests.conftest import ModelDirectories

HOT = SamplingParams(temperature=0.8)
PENALIZED = SamplingParams(
    temperature=1.2, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, logit_bias=((40, 2.0),)
)
DEFAULTS = RequestDefaults(temperature=0.9, top_k=50, max_new_tokens=6)


@asynccontextmanager
async def server(
    model: ModelConfig, defaults: RequestDefaults = DEFAULTS, model_id: str = "m", **adapters: str
) -> AsyncGenerator[LocalCompleter, None]:
    tokenizer, backend = Tokenizer.load(model.path), load_backend(model)
    grammars = Grammars(GrammarCompiler(tokenizer, backend.vocab_size))
    async with running(
        TargetEngine(SlotDecoder(backend), EngineLimits(eos_token_ids=tokenizer.eos_token_ids), grammars)
    ) as engine:
        yield LocalCompleter(engine, tokenizer, defaults, model_id=model_id, adapters=adapters)


@pytest.fixture
def model(models: ModelDirectories) -> ModelConfig:
    return ModelConfig(models.chat_target, num_slots=2, num_threads=1)


async def events_of(completer: LocalCompleter, request: CompletionRequest) -> list[TextEvent]:
    """Return all events of an answer; request and events are converted to gRPC messages and back."""
    asked = completion_from_message(completion_to_message(request))
    return [event_from_message(event_to_message(event)) async for event in completer.complete(asked)]


async def begun(completer: LocalCompleter, request: CompletionRequest) -> Started:
    started = (await events_of(completer, request))[0]
    assert isinstance(started, Started)
    return started


async def cut(
    completer: LocalCompleter, request: CompletionRequest, num_deltas: int
) -> tuple[Progress, list[TextEvent]]:
    """Lose the server after `num_deltas` deltas; return (what a client keeps for going on, the events until then)."""
    answer, seen = Progress(request), []
    asked = completion_from_message(completion_to_message(request))
    async with aclosing(completer.complete(asked)) as events:
        async for event in events:
            if isinstance(event, Delta) and num_deltas == 0:
                break
            num_deltas -= isinstance(event, Delta)
            if answer.take(event_from_message(event_to_message(event))):
                seen.append(event)
    return answer, seen


def rounded(score: TokenLogprobs) -> TokenLogprobs:
    """Round log-probabilities, since passes over another number of tokens differ in the last bits."""
    return replace(score, logprobs=tuple(round(each, 3) for each in score.logprobs))


def shown(events: Sequence[TextEvent]) -> tuple[object, ...]:
    """Return what a client sees of an answer: tokens, pieces of text, log-probabilities, and the finish reason."""
    deltas = [event for event in events if isinstance(event, Delta)]
    started = [
        replace(event, prompt_logprobs=(), num_cached_tokens=0) for event in events if isinstance(event, Started)
    ]
    return (
        started,
        [token_id for each in deltas for token_id in each.token_ids],
        [piece for each in deltas for piece in each.pieces()],
        "".join(each.text for each in deltas),
        [rounded(score) for each in deltas for score in each.logprobs],
        [each.finish_reason for each in deltas][-1:],
    )


REQUESTS = {
    "without a seed": CompletionRequest("the wind", HOT, max_new_tokens=5),
    "what is left open": CompletionRequest("the wind", max_new_tokens=None, unsaid=frozenset({"temperature", "top_k"})),
    "token ids": CompletionRequest((5, 6, 7), HOT, seed=4, max_new_tokens=5, ignore_eos=True),
    "chat": CompletionRequest(Chat((ChatMessage("user", "hello"),)), HOT, seed=5, max_new_tokens=5),
    "penalties": CompletionRequest("the wind", PENALIZED, seed=6, max_new_tokens=10, ignore_eos=True),
    "logprobs": CompletionRequest("the wind", HOT, seed=7, max_new_tokens=6, logprobs=2, prompt_logprobs=1, echo=True),
    "least length": CompletionRequest(
        "x", HOT, seed=8, max_new_tokens=12, min_new_tokens=6, stop_token_ids=frozenset(range(3, 200))
    ),
    "characters of several tokens": CompletionRequest(
        "x", HOT, seed=9, max_new_tokens=12, grammar=Grammar(GrammarKind.REGEX, "(é|ü|日|🙂){6,8}")
    ),
    "a grammar": CompletionRequest(
        "x", HOT, seed=10, max_new_tokens=24, grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"enum":["abcdef","xyz"]}')
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_an_answer_cut_at_any_token_goes_on_unchanged(model: ModelConfig, name: str) -> None:
    """An answer that is cut off at any token and goes on at a second server is the same as without the cut.

    The second server has other defaults, but the request that it gets has the values that the first one filled in.
    """
    request = REQUESTS[name]
    async with server(model) as first, server(model, RequestDefaults(temperature=2.0, max_new_tokens=3)) as second:
        whole = await events_of(first, request)
        if request.seed is None:
            request = replace(request, seed=whole[0].seed)  # type: ignore[union-attr]
        num_deltas = sum(isinstance(event, Delta) for event in whole)
        for place in range(num_deltas):
            answer, seen = await cut(first, request, place)
            if not seen:
                continue
            if answer.reason is None:  # a pass may take more tokens than the last time: then nothing is left to cut
                seen += [event for event in await events_of(second, answer.rest()) if answer.take(event)]
            assert shown(seen) == shown(whole)
            assert answer.reason is not None
            assert Finished(answer.reason) == whole[-1]


async def test_cut_within_a_stop_string(model: ModelConfig) -> None:
    """An answer cut off within a stop string goes on with the same text: the next server too waits to send its part."""
    async with server(model) as first, server(model) as second:
        plain = CompletionRequest("the wind", HOT, seed=11, max_new_tokens=12, ignore_eos=True)
        text = "".join(each.text for each in await events_of(first, plain) if isinstance(each, Delta))
        middle = len(text) // 2
        stops = (text[middle : middle + 4], text[1:3] + "never", text[-3:] + "never")
        request = replace(plain, stop=stops)
        whole = await events_of(first, request)
        assert "".join(each.text for each in whole if isinstance(each, Delta)) == text[: text.index(stops[0])]
        for place in range(1, sum(isinstance(event, Delta) for event in whole)):
            answer, seen = await cut(first, request, place)
            if answer.reason is None:
                rest = [event for event in await events_of(second, answer.rest()) if answer.take(event)]
                assert shown([*seen, *rest]) == shown(whole)


CANNOT_BE: list[tuple[str, tuple[int, ...], dict[str, str], type[Exception], str]] = [
    ("m", (5,), {"model_id": "other"}, IncompatibleDraftError, "model_id other, here it is m"),
    ("m", (5,), {"model_id": ""}, IncompatibleDraftError, "model_id unknown"),
    ("m", (5,), {"grammar_version": "older"}, IncompatibleDraftError, "grammar_version older"),
    ("m", (5,), {"prompt_digest": "0123"}, IncompatibleDraftError, "prompt_digest 0123"),
    ("", (), {}, IncompatibleDraftError, "model_id unknown"),
    ("m", (5,) * 24, {}, InvalidRequestError, "max_new_tokens is 24"),
    ("m", (1000,), {}, InvalidRequestError, "token id 1000 is outside"),
]


@pytest.mark.parametrize(("model_id", "token_ids", "change", "error", "words"), CANNOT_BE)
async def test_impossible_resumes_are_refused(
    model: ModelConfig,
    model_id: str,
    token_ids: tuple[int, ...],
    change: dict[str, str],
    error: type[Exception],
    words: str,
) -> None:
    """A server goes on with an answer only if it has the same model and tokenizer, and tokens are left to generate.

    Regression: a target was restarted with another tokenizer, and went on with an answer of the former one.
    """
    asked = REQUESTS["a grammar"]
    async with server(model, model_id=model_id) as completer:
        resume = Resume(token_ids, replace((await begun(completer, asked)).provenance, **change))
        with pytest.raises(error, match=words):
            await events_of(completer, replace(asked, resume=resume))


async def test_an_adapter_is_a_part_of_the_model_that_others_must_have(model: ModelConfig) -> None:
    """An answer goes on only at a server whose adapter has the same content; an equal name is not enough."""
    asked = replace(REQUESTS["token ids"], adapter="poet")
    async with server(model, poet="1", clerk="2") as completer:
        started = await begun(completer, asked)
        assert (started.adapter, started.provenance.model_id) == ("poet", "m+1")
        with pytest.raises(NotFoundError, match="adapter other does not exist; there are: poet, clerk"):
            await events_of(completer, replace(asked, adapter="other"))
    for digest in "21":
        async with server(model, poet=digest) as completer:
            resumed = replace(asked, resume=Resume((), started.provenance), seed=started.seed)
            with nullcontext() if digest == "1" else pytest.raises(IncompatibleDraftError, match=r"m\+2"):
                assert await events_of(completer, resumed)


async def test_tokens_that_the_engine_refuses_are_not_made_text(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that a client sends as already generated are not decoded to text if the engine will refuse them.

    Regression: half a megabyte of such tokens was decoded, in 2 s, before it was refused as too long.
    """
    async with server(model) as completer:
        started = await begun(completer, REQUESTS["token ids"])
        monkeypatch.setattr(TextStream, "push", None)
        for max_new_tokens, words in ((10**6, "maximum context length"), (5000, "nothing more")):
            resume = Resume((5,) * 5000, started.provenance)
            request = replace(REQUESTS["token ids"], resume=resume, max_new_tokens=max_new_tokens)
            with pytest.raises(InvalidRequestError, match=words):
                await events_of(completer, request)


async def test_prompt_logprobs_let_others_run(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the log-probabilities of a prompt are converted to a message, other requests go on.

    Regression: adding texts to 2000 tokens' log-probabilities and converting them stopped the event loop for 0.13 s.
    """
    monkeypatch.setattr(local, "SCORED_TOKENS", 1)
    threads: set[threading.Thread] = set()
    turns: set[int] = set()
    convert, name, num_turns = event_to_message, with_text, 0

    def named(*args: Any) -> TokenLogprobs:
        turns.add(num_turns)
        return name(*args)

    def watched(event: TextEvent) -> Any:
        threads.add(threading.current_thread())
        return convert(event)

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(local, "with_text", named)
    async with server(model) as completer:
        request = CompletionRequest(tuple(range(5, 55)), max_new_tokens=1, prompt_logprobs=2)
        async with aclosing(completer.complete(request)) as events:
            bystander = asyncio.create_task(other())
            started = await anext(events)
            bystander.cancel()
    assert isinstance(started, Started)
    assert len(turns) == len(started.prompt_logprobs) == 50
    assert event_from_message(await converted(watched, started, started.prompt_logprobs)) == started
    assert threading.current_thread() not in threads
    await converted(watched, started, ())
    assert threading.current_thread() in threads
