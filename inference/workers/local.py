"""Completer over a tokenizer and a generator of this process."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from inference.commit import (
    Finished,
    FinishReason,
    Opened,
    Started,
    TextEvent,
    TokenLogprobs,
    TokenSource,
)
from inference.engine.target import check_token_ids
from inference.model.decoder import check_seed, is_seed_invariant
from inference.request import (
    NO_DEFAULTS,
    GenerationRequest,
    Provenance,
    RequestDefaults,
)
from inference.text.grammar_source import grammar_version
from inference.text.tokenizer import Tokenizer
from inference.workers.completion import CompletionRequest, Resume
from inference.workers.reading import Reader
from inference.workers.writing import Text, check_rest, with_text

SCORED_TOKENS = 32
"""Prompt tokens that get the texts of their log-probabilities in one go; other requests are served in between."""


class LocalCompleter:
    """`Completer` over a tokenizer and a generator.

    Args:
        defaults: values for what requests leave open.
        model_id: id of the target; if it is empty (unknown), no other server can continue the answers.
    """

    def __init__(
        self,
        generator: TokenSource,
        tokenizer: Tokenizer,
        defaults: RequestDefaults = NO_DEFAULTS,
        *,
        model_id: str = "",
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._model_id = model_id
        self._reader = Reader(
            tokenizer, max_length=generator.max_length, vocab_size=generator.vocab_size, defaults=defaults
        )
        self.codec = self._reader.codec

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        """See `Completer`."""
        defaults = self._reader.defaults if request.unsaid or request.max_new_tokens is None else None
        request = request.resolved(self._reader.defaults)
        if request.seed is not None:
            check_seed(self._generator, request.sampling)
        generation = await self._reader.read(request)
        text = Text(self._tokenizer, request)
        started = self._started(request, generation, defaults)
        if request.resume is not None:
            generation = self._resumed(generation, request.resume)
        if request.max_new_tokens == 0 and request.prompt_logprobs is None:  # no pass is needed
            yield started
            yield Finished(FinishReason.LENGTH)
            return
        async with aclosing(self._generator.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Opened):  # only now: a request that is refused has never started
                    await text.replay(request.resume)
                    yield await self._opened(started, generation, event)
                    continue
                if request.max_new_tokens == 0:  # the pass that read the prompt chose a token too: it is not wanted
                    yield Finished(FinishReason.LENGTH)
                    return
                delta = text.delta(event)
                if delta.token_ids or delta.text or delta.finish_reason is not None:
                    yield delta
                if delta.finish_reason is not None:
                    yield Finished(delta.finish_reason)
                    return  # a stop string ends the text here; leaving the block cancels the generator

    def _started(
        self, request: CompletionRequest, generation: GenerationRequest, defaults: RequestDefaults | None
    ) -> Started:
        token_ids, text, has_grammar = generation.prompt_token_ids, "", request.grammar is not None
        if request.echo:
            text = request.prompt if isinstance(request.prompt, str) else self._tokenizer.decode(token_ids)
        seed, origin = generation.sampling.seed, self._provenance(generation)
        return Started(len(token_ids), seed, text, has_grammar=has_grammar, provenance=origin, defaults=defaults)

    def _provenance(self, generation: GenerationRequest) -> Provenance:
        goes_on = generation.sampling.greedy or is_seed_invariant(self._generator)
        return Provenance(
            self._model_id if goes_on else "",
            "" if generation.grammar is None else grammar_version(),
            _digest(generation.prompt_token_ids),
        )

    def _resumed(self, generation: GenerationRequest, resume: Resume) -> GenerationRequest:
        """Return the rest of a request that another server began.

        Raises:
            IncompatibleDraftError: this server would continue with other tokens.
            InvalidRequestError: nothing is left to generate.
        """
        resume.provenance.require_same(self._provenance(generation))
        check_token_ids(resume.token_ids, vocab_size=self._generator.vocab_size)
        limit = generation.max_new_tokens
        check_rest(resume, f"max_new_tokens is {limit}" if len(resume.token_ids) >= limit else "")
        return generation.resumed(resume.token_ids)

    async def _opened(self, started: Started, generation: GenerationRequest, opened: Opened) -> Started:
        """Return Started with what the first pass made known."""
        if generation.prompt_logprobs is not None:
            started = replace(started, prompt_logprobs=await self._of_prompt(generation, opened))
        return replace(started, num_cached_tokens=opened.num_cached_tokens)

    async def _of_prompt(self, generation: GenerationRequest, opened: Opened) -> tuple[TokenLogprobs, ...]:
        """Return the prompt's log-probabilities with their texts, and with the first token, which follows nothing.

        Lets the event loop run meanwhile: 2000 tokens, each with the 20 best ones, take 0.1 s.
        """
        first = generation.prompt_token_ids[0]
        stream = self._tokenizer.stream()
        entries = (TokenLogprobs((first,), (0.0,)), *opened.prompt_logprobs)
        named = []
        for i, each in enumerate(entries):
            named.append(with_text(self._tokenizer, each, len(stream.push(each.token_ids[0]))))
            if i % SCORED_TOKENS == 0:
                await asyncio.sleep(0)
        return tuple(named)


def _digest(token_ids: Sequence[int]) -> str:
    """Return 16 hex digits of SHA-256 over token ids, each as 32 bits, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()[:16]
