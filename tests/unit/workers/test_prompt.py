"""What reading a prompt may cost the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inference.errors import InvalidRequestError
from inference.text.chat import Chat, ChatMessage
from inference.text.tokenizer import Tokenizer
from inference.workers.prompt import MIN_CHARACTERS, LocalCodec
from tests.support.models import save_tiny_model

SLOW = "{% for i in range(1500) %}{% for j in range(1500) %}{% endfor %}{% endfor %}{{ messages[0]['content'] }}"


async def test_the_template_of_another_server_is_not_run_on_the_loop(tmp_path: Path) -> None:
    """The story: a draft ran its target's template, whatever that was, where it also served everybody else."""
    save_tiny_model(tmp_path, "llama")
    tokenizer = Tokenizer.load(tmp_path).with_template(SLOW, tmp_path)
    codec = LocalCodec(tokenizer, vocab_size=1000, max_length=128)
    reading = asyncio.create_task(codec.encode(Chat.of(("user", "on"))))
    await asyncio.sleep(0)
    assert not reading.done()
    assert await reading == tokenizer.encode("on", special=False)


@pytest.mark.parametrize("field", ["content", "tool_call_id", "name", "reasoning"])
async def test_every_part_of_a_message_counts(tmp_path: Path, field: str) -> None:
    """The story: the id of a call counted for nothing, so megabytes of it were tokenized, and on the event loop."""
    save_tiny_model(tmp_path, "llama")
    codec = LocalCodec(Tokenizer.load(tmp_path), vocab_size=1000, max_length=128)
    message = ChatMessage("tool", **{field: "x" * MIN_CHARACTERS})
    with pytest.raises(InvalidRequestError, match=f"the limit is {MIN_CHARACTERS}"):
        await codec.encode(Chat((message,)))
