"""Reading of completion requests: prompt to token ids, defaults, seed, grammar. Knows no model that computes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from inference.caller import caller
from inference.engine.threads import Threads
from inference.errors import ContextLengthError, InvalidRequestError
from inference.request import (
    NO_DEFAULTS,
    GenerationRequest,
    Grammar,
    Preamble,
    RequestDefaults,
    check_logit_bias,
)
from inference.text.chat import Chat
from inference.text.reasoning import is_begun, is_over
from inference.text.tokenizer import Tokenizer
from inference.workers.completion import DRAFT_SESSION_BYTES, CompletionRequest

MAX_INLINE_CHARACTERS = 20_000
"""Longest prompt that the event loop tokenizes; others go to a thread, since megabytes take seconds."""
MAX_INLINE_IDS = 4096
"""Most token ids that the event loop decodes; more go to a thread."""
MIN_CHARACTERS, MIN_IDS = 640 * 1024, 256 * 1024
"""Lengths that are read whatever the context: a draft's own may be shorter than its target's."""
NUM_THREADS = 2
MAX_READING = 16
"""Limit of long prompts being read or waiting for it: each takes up to 150 times its length in memory."""
Ids = TypeVar("Ids", bound=Sequence[int])


class LocalCodec:
    """A `Codec` over a tokenizer of this process.

    Args:
        tokenizer: tokenizer of the model; one with the same vocabulary and another chat template may replace it.
        vocab_size: number of token ids; others are refused. Another size of the same vocabulary may replace it.
        max_length: tokens of the context; a text longer than that many of the longest token is refused unread.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._max_characters = max(MIN_CHARACTERS, max_length * tokenizer.longest_token)
        self._max_ids = max(MIN_IDS, max_length)
        self._inline, self._num_inline = asyncio.Lock(), 0
        self._threads = Threads("long texts", num_threads=NUM_THREADS, num_places=MAX_READING)

    async def encode(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        """See `Codec`.

        Raises:
            InvalidRequestError: the prompt is too long for any context here, or the chat template refuses it.
            CapacityError: too many long prompts are being read.
        """
        num_characters = len(prompt) if isinstance(prompt, str) else prompt.check()
        if num_characters > self._max_characters:
            message = f"the prompt has {num_characters} characters, the limit is {self._max_characters}"
            raise InvalidRequestError(message, field="prompt")
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
        """Return the ids; raise ContextLengthError, unread, if they are more than any context here holds."""
        if len(token_ids) > self._max_ids:
            message = f"{len(token_ids)} token ids are more than any context here holds ({self._max_ids})"
            raise ContextLengthError(message, field="prompt")
        return token_ids

    def _read(self, prompt: str | Chat, special: bool) -> tuple[int, ...]:
        if isinstance(prompt, Chat):
            return self.tokenizer.encode_chat(prompt)
        return self.tokenizer.encode(prompt, special=special)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """See `Codec`."""
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


_END_TOKENS = 16
"""Number of last tokens of a prompt that are searched for the mark of a reasoning."""


class Reader:
    """Reader of requests for one model, at the server that answers them, or at a draft worker beside their client.

    Args:
        tokenizer: tokenizer of the model, with its chat template.
        max_length: most tokens of prompt and output together.
        vocab_size: number of token ids.
        defaults: values for what requests leave open.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, max_length: int, vocab_size: int, defaults: RequestDefaults = NO_DEFAULTS
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.defaults = defaults
        self.codec = LocalCodec(tokenizer, vocab_size=vocab_size, max_length=max_length)

    async def read(self, request: CompletionRequest) -> GenerationRequest:
        """Return a request as the model computes it, from its beginning; without a seed it gets a random one.

        Args:
            request: request with nothing left open; see `CompletionRequest.resolved`.

        Raises:
            InvalidRequestError: the prompt is empty or too long, or a token id is outside the vocabulary.
            CapacityError: too many long prompts are being read.
        """
        prompt = request.prompt
        token_ids = self.codec.checked(prompt) if isinstance(prompt, tuple) else await self.codec.encode(prompt)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: it has no token", field="prompt")
        check_logit_bias(request.sampling, vocab_size=self.vocab_size)
        seed = _seed_of(request) if request.seed is None else request.seed
        generation = GenerationRequest(
            prompt_token_ids=token_ids,
            sampling=replace(request.sampling, seed=seed),
            max_new_tokens=max(1, request.max_new_tokens or 0),  # 0 reads the prompt, which a pass of one token does
            stop_token_ids=request.stop_token_ids,
            stop_at_eos=not request.ignore_eos,
            gamma=request.gamma,
            schedule=request.schedule,
            logprobs=request.logprobs,
            min_new_tokens=request.min_new_tokens,
            prompt_logprobs=request.prompt_logprobs,
            grammar=self._after_prompt(token_ids, request.grammar),
            cache_salt=caller().cache_salt(request.cache_salt),
            draft_session=request.draft_session,
            include_rejected=request.include_rejected,
        )
        # A draft must follow the same sampling, and only the tokenizer knows the end tokens.
        return replace(generation, sampling=generation.effective_sampling(self.tokenizer.eos_token_ids))

    def _after_prompt(self, prompt: tuple[int, ...], grammar: Grammar | None) -> Grammar | None:
        """Return the grammar with the preamble that the prompt leaves; it depends on the prompt alone, on no state."""
        if grammar is None or grammar.preamble is Preamble.NONE:
            return grammar
        end = self.tokenizer.decode(prompt[-_END_TOKENS:], special=True)
        if is_over(end):
            return replace(grammar, preamble=Preamble.NONE)
        return replace(grammar, preamble=Preamble.REST_OF_REASONING) if is_begun(end) else grammar


def _seed_of(request: CompletionRequest) -> int:
    """Return a random seed. The name of a draft session gives its own, so that target and private worker have one."""
    if not request.draft_session:
        return secrets.randbits(64)
    return int(request.draft_session[-2 * DRAFT_SESSION_BYTES :][:16], 16)
