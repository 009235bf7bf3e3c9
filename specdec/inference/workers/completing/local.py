"""Completer that answers by an engine of this process: it converts prompts to token ids, and output tokens to text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from specdec.inference.commit import (
    Finished,
    FinishReason,
    Opened,
    Started,
    TextEvent,
    TokenLogprobs,
    TokenSource,
)
from specdec.inference.engine.target import check_token_ids
from specdec.inference.errors import NotFoundError
from specdec.inference.model.decoder import check_seed, is_seed_invariant
from specdec.inference.request import (
    NO_DEFAULTS,
    GenerationRequest,
    Provenance,
    RequestDefaults,
)
from specdec.inference.text.grammar_source import grammar_version
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completing.reading import Reader, digest
from specdec.inference.workers.completing.writing import Text, check_rest, with_text
from specdec.inference.workers.completion import CompletionRequest

logger = logging.getLogger(__name__)

SCORED_TOKENS = 32
"""Number of prompt tokens whose log-probabilities are converted, with the texts of the tokens, before the event loop
serves other requests."""


MAX_NAME = 200
"""Most characters of an unknown adapter's name that an error message repeats."""


class LocalCompleter:
    """`Completer` that answers by a source of tokens such as an engine, and a tokenizer, both in this process.

    Args:
        generator: source of tokens.
        tokenizer: tokenizer of the model that the generator runs.
        defaults: values for parameters that requests leave open.
        model_id: hash of all that the model's tokens depend on; if it is empty (unknown), no other server can continue
            the answers.
        adapters: hashes of the model's adapters (LoRA), by name.
    """

    def __init__(
        self,
        generator: TokenSource,
        tokenizer: Tokenizer,
        defaults: RequestDefaults = NO_DEFAULTS,
        *,
        model_id: str = "",
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self._generator = generator
        self._adapters = adapters or {}
        self._tokenizer = tokenizer
        self._model_id = model_id
        self._reader = Reader(
            tokenizer, max_length=generator.max_length, vocab_size=generator.vocab_size, defaults=defaults
        )
        self.codec = self._reader.codec

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        """Yield the answer: one Started, one Delta for each target pass, and one Finished.

        Closing the iterator cancels the request. Errors are those of `Completer.complete`.
        """
        request, generation, started = await self._prepared(request)
        wants_tokens = request.max_new_tokens != 0
        if not wants_tokens and request.prompt_logprobs is None and request.audit is None:  # no pass is needed
            yield started
            yield Finished(FinishReason.LENGTH)
            return
        text = Text(self._tokenizer, request)
        async with aclosing(self._generator.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Opened):  # only now: a request that is refused has never started
                    await text.replay(request.resume)
                    yield await self._opened(started, generation, event)
                    continue
                if not wants_tokens:  # the pass that read the prompt chose a token too
                    yield Finished(FinishReason.LENGTH)
                    return
                delta = text.delta(event)
                if delta.token_ids or delta.text or delta.finish_reason is not None:
                    yield delta
                if delta.finish_reason is not None:
                    yield Finished(delta.finish_reason)
                    return  # a stop string ends the text here; leaving the block cancels the generator

    async def _prepared(self, given: CompletionRequest) -> tuple[CompletionRequest, GenerationRequest, Started]:
        """Return a request with its defaults filled in, the request to the engine, and the answer's first event.

        Raises:
            InvalidRequestError: the request is not valid for this model.
            CapacityError: too many long prompts are being read.
            NotFoundError: the model has no adapter of the name that the request asks for.
            IncompatibleDraftError: this server would continue the answer with other tokens.
        """
        if given.adapter and given.adapter not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise NotFoundError(f"adapter {given.adapter[:MAX_NAME]} does not exist; there are: {known}")
        request = given.resolved(self._reader.defaults)
        if request.seed is not None:
            check_seed(self._generator, request.sampling)
        generation = await self._reader.read(request)
        if generation.max_new_tokens > (context := self._generator.max_length):
            num_left = context - len(generation.prompt_token_ids)
            text = "max_tokens %d is above the context of %d tokens, which leaves %d: the answer ends there"
            logger.info(text, generation.max_new_tokens, context, num_left)
        started = self._started(request, generation, None if request is given else self._reader.defaults)
        return request, self._rest(generation, request), started

    def _started(
        self, request: CompletionRequest, generation: GenerationRequest, defaults: RequestDefaults | None
    ) -> Started:
        """Return the answer's first event; `defaults` is None unless the request left a parameter open."""
        token_ids, text, has_grammar = generation.prompt_token_ids, "", request.grammar is not None
        if request.echo:
            text = request.prompt if isinstance(request.prompt, str) else self._tokenizer.decode(token_ids)
        seed = generation.sampling.seed
        return Started(
            len(token_ids),
            seed,
            text,
            has_grammar=has_grammar,
            provenance=self._provenance(generation),
            defaults=defaults,
            adapter=request.adapter,
        )

    def _provenance(self, generation: GenerationRequest) -> Provenance:
        goes_on = self._model_id and (generation.sampling.greedy or is_seed_invariant(self._generator))
        adapted = f"+{self._adapters[generation.adapter]}" if generation.adapter else ""
        return Provenance(
            self._model_id + adapted if goes_on else "",
            "" if generation.grammar is None else grammar_version(),
            digest(generation.prompt_token_ids),
        )

    def _rest(self, generation: GenerationRequest, request: CompletionRequest) -> GenerationRequest:
        """Return the request to the engine for what is left to generate.

        For a new request that is everything, and `generation` is returned. For a resumed one it is what follows the
        tokens that another server committed, and for an audit what follows the output to be audited.

        Raises:
            IncompatibleDraftError: this server would continue the answer with other tokens.
            InvalidRequestError: nothing is left to generate.
        """
        if request.audit is not None:
            check_token_ids(request.audit, vocab_size=self._generator.vocab_size)
            return replace(generation.resumed(request.audit), audits=True)
        if (resume := request.resume) is None:
            return generation
        resume.provenance.require_same(self._provenance(generation))
        check_token_ids(resume.token_ids, vocab_size=self._generator.vocab_size)
        limit = generation.max_new_tokens
        check_rest(resume, f"max_new_tokens is {limit}" if len(resume.token_ids) >= limit else "")
        return generation.resumed(resume.token_ids)

    async def _opened(self, started: Started, generation: GenerationRequest, opened: Opened) -> Started:
        """Return `started` with what the engine found when it read the prompt.

        That is the number of cached tokens, the prompt's log-probabilities, and the comparisons of an audited output.
        """
        scores = () if generation.prompt_logprobs is None else await self._of_prompt(generation, opened)
        num_cached = opened.num_cached_tokens
        return replace(started, prompt_logprobs=scores, num_cached_tokens=num_cached, audits=opened.audits)

    async def _of_prompt(self, generation: GenerationRequest, opened: Opened) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities at all prompt tokens, with the tokens' bytes.

        The first token, which follows no other, gets 0.

        Other tasks run in between, since 2000 tokens with the 20 best ones at each take 0.1 s.
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
