"""Limits of the time and memory that one prompt may take from other requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.errors import ContextLengthError, InvalidRequestError
from specdec.inference.text.chat import Chat, ChatMessage
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.prompt import (
    MAX_INLINE_CHARACTERS,
    MAX_INLINE_IDS,
    MIN_CHARACTERS,
    MIN_IDS,
    LocalCodec,
)
from specdec.inference.workers.completion import CompletionRequest
from tests.support.models import DEFAULT_VOCAB_SIZE, save_tiny_model, tiny_tokenizer

SLOW = "{% for i in range(1500) %}{% for j in range(1500) %}{% endfor %}{% endfor %}{{ messages[0]['content'] }}"


async def test_a_servers_template_runs_beside_the_loop(tmp_path: Path) -> None:
    """The chat template that a target sends runs in a thread, so that the event loop goes on.

    Regression: a draft ran its target's chat template, whatever its content, on the event loop that serves all
    requests.
    """
    save_tiny_model(tmp_path, "llama")
    tokenizer = Tokenizer.load(tmp_path).with_template(SLOW, tmp_path)
    codec = LocalCodec(tokenizer, vocab_size=1000, max_length=128)
    reading = asyncio.create_task(codec.encode(Chat.of(("user", "on"))))
    await asyncio.sleep(0)
    assert not reading.done()
    assert await reading == tokenizer.encode("on", special=False)


@pytest.mark.parametrize("field", ["content", "tool_call_id", "name", "reasoning"])
async def test_every_part_of_a_message_counts(tmp_path: Path, field: str) -> None:
    """Every field of a chat message counts towards the limit of length.

    Regression: no limit counted the id of a call, so megabytes of it were tokenized, and on the event loop.
    """
    save_tiny_model(tmp_path, "llama")
    codec = LocalCodec(Tokenizer.load(tmp_path), vocab_size=1000, max_length=128)
    message = ChatMessage("tool", **{field: "x" * MIN_CHARACTERS})
    with pytest.raises(ContextLengthError, match=f"the limit is {MIN_CHARACTERS}"):
        await codec.encode(Chat((message,)))


def codec() -> LocalCodec:
    return LocalCodec(Tokenizer(tiny_tokenizer(), frozenset()), vocab_size=DEFAULT_VOCAB_SIZE, max_length=128)


async def test_prompts_that_come_together_let_others_have_their_turn() -> None:
    """While many prompts are tokenized, other tasks of the event loop run in between.

    Regression: a long prompt with 32 choices was tokenized 32 times in a row on the event loop.
    """
    reader, num_turns = codec(), 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    bystander = asyncio.create_task(other())
    text = "x" * (MAX_INLINE_CHARACTERS // 2)
    token_ids = await asyncio.gather(*(reader.encode(text) for _ in range(32)))
    assert num_turns >= 16
    num_turns = 0
    assert len(set(await asyncio.gather(*(reader.decode([40] * 1000) for _ in range(32))))) == 1
    assert num_turns >= 32
    bystander.cancel()
    assert set(token_ids) == {await reader.encode(text)}


async def test_more_ids_than_any_context_holds_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of more token ids than any model's context has is refused before its ids are decoded.

    Regression: all ids were decoded to text first, so 1 kB of gzip stopped a server for 0.1 s.
    """
    reader = codec()
    for few_or_many in (1, MAX_INLINE_IDS):
        with pytest.raises(InvalidRequestError, match="token id 999 is outside"):
            await reader.decode([5] * few_or_many + [999])
    monkeypatch.setattr(Tokenizer, "decode", None)
    with pytest.raises(ContextLengthError, match=f"{MIN_IDS + 1} token ids"):
        await reader.decode(range(3, MIN_IDS + 4))
    with pytest.raises(ContextLengthError, match=f"{4 * MIN_IDS // 2} token ids"):
        await reader.encode("\U00012345" * (MIN_IDS // 2), special=False)
    completer = LocalCompleter(NoGenerator(), Tokenizer(tiny_tokenizer(), frozenset()))
    with pytest.raises(ContextLengthError):
        await anext(completer.complete(CompletionRequest((5,) * (MIN_IDS + 1), echo=True)))


class NoGenerator:
    """Generator of tokens that makes a test fail if it is called."""

    max_length, vocab_size, seed_invariant = 128, DEFAULT_VOCAB_SIZE, True
    generate: Any = None
