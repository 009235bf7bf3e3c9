"""Conversion of prompts to token ids and back in this process, with limits that are checked before the work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from specdec.inference.engine.threads import Threads
from specdec.inference.errors import ContextLengthError, InvalidRequestError
from specdec.inference.text.chat import Chat
from specdec.inference.text.tokenizer import Tokenizer

MAX_INLINE_CHARACTERS = 20_000
"""Longest prompt, in characters, that is tokenized on the event loop; longer ones go to a thread."""
MAX_INLINE_IDS = 4096
"""Most token ids that the event loop decodes; more go to a thread."""
MIN_CHARACTERS, MIN_IDS = 640 * 1024, 256 * 1024
"""Numbers of characters and of token ids up to which a prompt is read even if it is longer than this model's context,
since a draft model's context may be shorter than its target's."""
NUM_THREADS = 2
MAX_READING = 16
"""Most long prompts that are being tokenized in threads or wait for a thread, since each takes up to 150 times its
length in memory."""
Ids = TypeVar("Ids", bound=Sequence[int])


class LocalCodec:
    """`Codec` over a tokenizer of this process.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: number of token ids; ids from this number on are refused.
        max_length: number of tokens of the model's context. A text of more than `MIN_CHARACTERS` characters is refused
            without tokenizing if it is also longer than `max_length` times the longest token.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._max_characters = max(MIN_CHARACTERS, max_length * tokenizer.longest_token)
        self._max_ids = max(MIN_IDS, max_length)
        self._inline, self._num_inline = asyncio.Lock(), 0
        self._threads = Threads("long texts", num_threads=NUM_THREADS, num_places=MAX_READING)

    async def encode(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text or a conversation; `special` adds the model's special tokens to a text.

        Raises:
            InvalidRequestError: the prompt is too long for any context here, or the chat template refuses it.
            CapacityError: too many long prompts are being read.
        """
        num_characters = len(prompt) if isinstance(prompt, str) else prompt.check()
        if num_characters > self._max_characters:
            message = f"{num_characters} characters of the prompt are more than any context here holds"
            raise ContextLengthError(f"{message} (the limit is {self._max_characters})", field="prompt")
        is_slow = isinstance(prompt, Chat) and self.tokenizer.is_slow_to_chat
        if is_slow or num_characters > MAX_INLINE_CHARACTERS:
            return self.checked(await self._threads.run(self._read, prompt, special))
        async with self._inline:  # others get a turn in between: a body may ask for 128 answers to one prompt
            self._num_inline += num_characters
            if self._num_inline > MAX_INLINE_CHARACTERS:
                self._num_inline = num_characters
                await asyncio.sleep(0)
            return self._read(prompt, special)

    def checked(self, token_ids: Ids) -> Ids:
        """Return `token_ids` unchanged, after a check of their number.

        Raises:
            ContextLengthError: there are more than `MIN_IDS`, and more than fit into the model's context.
        """
        if len(token_ids) > self._max_ids:
            message = f"{len(token_ids)} token ids are more than any context here holds ({self._max_ids})"
            raise ContextLengthError(message, field="prompt")
        return token_ids

    def _read(self, prompt: str | Chat, special: bool) -> tuple[int, ...]:
        if isinstance(prompt, Chat):
            return self.tokenizer.encode_chat(prompt)
        return self.tokenizer.encode(prompt, special=special)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens by their names.

        Raises:
            InvalidRequestError: there are too many ids for any context here, or one is outside the vocabulary.
            CapacityError: too many long prompts or lists of ids are being converted.
        """
        if len(self.checked(token_ids)) > MAX_INLINE_IDS:
            return await self._threads.run(self._write, token_ids)
        async with self._inline:
            await asyncio.sleep(0)
            return self._write(token_ids)

    def _write(self, token_ids: Sequence[int]) -> str:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                message = f"token id {token_id} is outside the vocabulary of {self.vocab_size}"
                raise InvalidRequestError(message, field="tokens")
        return self.tokenizer.decode(token_ids, special=True)
