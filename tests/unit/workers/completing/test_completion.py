"""`LocalCompleter`, which turns a request's prompt into tokens for an engine, and the engine's tokens into text."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from specdec.inference.commit import Commit, Delta, FinishReason, Opened, TokenEvent, TokenLogprobs
from specdec.inference.errors import InvalidRequestError
from specdec.inference.gateway.answers.formats import text_logprobs
from specdec.inference.request import GenerationRequest, Grammar, GrammarKind, Preamble
from specdec.inference.text.chat import Chat, ChatMessage
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.calls.convert import event_from_message, event_to_message
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completion import CompletionRequest
from tests.support.models import marked_tokenizer, tiny_tokenizer


class RefusingGenerator:
    """Generator of tokens that refuses every prompt as too long."""

    max_length, vocab_size, seed_invariant = 8, 288, True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        raise InvalidRequestError(f"the prompt has {len(request.prompt_token_ids)} tokens")
        yield


class WritingGenerator:
    """Generator that gives the tokens `token_ids` in one pass, with log-probabilities."""

    max_length, vocab_size, seed_invariant = 8, 288, True

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        yield Opened()
        logprobs = tuple(TokenLogprobs((token_id,), (-0.5,)) for token_id in self._token_ids)
        yield Commit(1, self._token_ids, finish_reason=FinishReason.LENGTH, logprobs=logprobs)


E_ACUTE = Tokenizer(tiny_tokenizer(), frozenset()).encode("é")


@pytest.mark.parametrize("stop", [(), ("é!",)], ids=["", "held back"])
@pytest.mark.parametrize(
    ("token_ids", "offsets"),
    [((*E_ACUTE, *E_ACUTE), [0, 0, 1, 1]), ((1, 1, 1, 1), [0, 0, 0, 0]), ((1, *E_ACUTE, 1), [0, 0, 0, 1])],
    ids=["characters of two tokens", "special tokens", "both"],
)
async def test_offsets_count_the_text_that_tokens_have(
    token_ids: tuple[int, ...], offsets: list[int], stop: tuple[str, ...]
) -> None:
    """The offset of a token in the text is the number of characters of all tokens before it, decoded together.

    Regression: offsets were sums of the bytes of single tokens, and so were wrong after tokens with a part of a
    character and after special tokens, which have no text.
    """
    completer = LocalCompleter(WritingGenerator(token_ids), Tokenizer(tiny_tokenizer(), frozenset()))
    events = [event async for event in completer.complete(CompletionRequest("x", stop=stop))]
    (delta,) = [event for event in map(event_from_message, map(event_to_message, events)) if isinstance(event, Delta)]
    assert text_logprobs(delta.logprobs, 0)["text_offset"] == offsets


@pytest.mark.parametrize("tools", ["", '[{"type": "function"}]'])
async def test_call_markers_are_text_without_tools(tools: str) -> None:
    tokenizer = Tokenizer(marked_tokenizer(), frozenset())
    token_ids = (*tokenizer.shown_markers(calls=True), *tokenizer.encode("the"))
    request = CompletionRequest(Chat((ChatMessage("user", "x"),), tools))
    completer = LocalCompleter(WritingGenerator(token_ids), tokenizer)
    events = [event async for event in completer.complete(request)]
    text = "".join(event.text for event in events if isinstance(event, Delta))
    assert text == ("<|python_tag|>the" if tools else "the")


PREAMBLES = {
    "x": Preamble.REASONING,
    "x<think>\n": Preamble.REST_OF_REASONING,
    "x<think>\n\n</think>\n\n": Preamble.NONE,
}


@pytest.mark.parametrize(("prompt", "preamble"), PREAMBLES.items())
async def test_a_grammars_preamble_follows_from_the_prompt(prompt: str, preamble: Preamble) -> None:
    asked = []

    class Asked(RefusingGenerator):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
            asked.append(request.grammar)
            async for commit in super().generate(request):
                yield commit

    completer = LocalCompleter(Asked(), Tokenizer(tiny_tokenizer(), frozenset()))
    grammar = Grammar(GrammarKind.REGEX, "a", Preamble.REASONING)
    with pytest.raises(InvalidRequestError, match="tokens"):
        await anext(completer.complete(CompletionRequest(prompt, grammar=grammar)))
    assert asked == [replace(grammar, preamble=preamble)]


async def test_a_limit_above_the_context_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A `max_tokens` above the model's context is logged, with the number of tokens that are left for the answer.

    Regression: such a request ended with reason `length` after fewer tokens than it asked for, and no log said why.
    """
    caplog.set_level(logging.INFO, "specdec")
    completer = LocalCompleter(WritingGenerator((5,)), Tokenizer(tiny_tokenizer(), frozenset()))
    limit = WritingGenerator.max_length
    for max_new_tokens in (limit, limit + 1):
        _ = [event async for event in completer.complete(CompletionRequest((5, 6), max_new_tokens=max_new_tokens))]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"max_tokens {limit + 1} is above the context of {limit} tokens, which leaves {limit - 2}")
