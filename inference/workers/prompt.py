"""From a prompt to its token ids, with limits before work. Knows no requests."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from inference.errors import CapacityError, InvalidRequestError
from inference.text.chat import Chat
from inference.text.tokenizer import Tokenizer

MAX_INLINE_CHARACTERS = 20_000
"""Longer prompts are tokenized on a thread: megabytes take seconds, in which nobody else would be served."""
MIN_CHARACTERS = 640 * 1024
"""Texts up to here are read whatever the context: a draft's own may be shorter than that of the target it serves."""
NUM_THREADS = 2
MAX_READING = 16
"""Long prompts that are read, or wait for it, at once: each takes up to 150 times its length in memory."""
RETRY_AFTER_S = 1.0


class PromptReader:
    """Tokenizes prompts of any kind.

    Args:
        tokenizer: of the model.
        max_length: tokens of the context; a text that is longer than so many of the longest token is refused unread.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_length: int) -> None:
        self.tokenizer = tokenizer
        self._max_characters = max(MIN_CHARACTERS, max_length * tokenizer.longest_token)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self._num_reading = 0

    async def read(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        """The prompt's token ids; of a text, with the special tokens around it or without.

        Raises:
            InvalidRequestError: it is longer than any prompt of this context, or the chat template refuses it.
            CapacityError: too many long prompts are being read.
        """
        num_characters = len(prompt) if isinstance(prompt, str) else prompt.check()
        if num_characters > self._max_characters:
            message = f"the prompt has {num_characters} characters, the limit is {self._max_characters}"
            raise InvalidRequestError(message, field="prompt")
        is_slow = isinstance(prompt, Chat) and self.tokenizer.is_slow_to_chat
        if is_slow or num_characters > MAX_INLINE_CHARACTERS:
            return await self._read_long(prompt, special)
        return self._encode(prompt, special)

    async def _read_long(self, prompt: str | Chat, special: bool) -> tuple[int, ...]:
        if self._num_reading >= MAX_READING:
            message = f"{self._num_reading} long prompts are being read already (limit {MAX_READING})"
            raise CapacityError(message, retry_after_s=RETRY_AFTER_S)
        self._num_reading += 1
        reading = asyncio.get_running_loop().run_in_executor(self._threads, self._encode, prompt, special)
        reading.add_done_callback(lambda _: self._leave())  # a client that goes takes a prompt out only if it waits
        return await reading

    def _leave(self) -> None:
        self._num_reading -= 1

    def _encode(self, prompt: str | Chat, special: bool) -> tuple[int, ...]:
        if isinstance(prompt, Chat):
            return self.tokenizer.encode_chat(prompt)
        return self.tokenizer.encode(prompt, special=special)
