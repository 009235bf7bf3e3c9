"""A tokenizer around a generator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest

from inference.errors import InvalidRequestError
from inference.tokenizer import Tokenizer
from inference.types import Commit, GenerationRequest
from inference.workers.completion import MAX_INLINE_CHARACTERS, Chat, CompletionRequest, LocalCompleter
from tests.tiny_models import tiny_tokenizer


class RefusingGenerator:
    """Has no room for a prompt."""

    max_length, vocab_size, seed_invariant = 8, 288, True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
        raise InvalidRequestError(f"the prompt has {len(request.prompt_token_ids)} tokens")
        yield


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_long_prompt_is_tokenized_beside_the_others(monkeypatch: pytest.MonkeyPatch, is_chat: bool) -> None:
    """The story: a prompt of 7 MB, to be refused, kept every stream of the server waiting for seven seconds."""
    loop_went_on = threading.Event()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str) -> tuple[int, ...]:
        assert loop_went_on.wait(timeout=30), "tokenized on the event loop"
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    completer = LocalCompleter(RefusingGenerator(), Tokenizer(tiny_tokenizer(), frozenset()))
    text = "the wind " * MAX_INLINE_CHARACTERS
    prompt = Chat((("user", text),)) if is_chat else text
    asking = asyncio.create_task(anext(completer.complete(CompletionRequest(prompt))))
    for _ in range(3):
        await asyncio.sleep(0)
    loop_went_on.set()
    with pytest.raises(InvalidRequestError, match="tokens"):
        await asking
