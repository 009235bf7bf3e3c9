"""Completer over a tokenizer and a generator of this process."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from inference.caller import caller
from inference.commit import (
    Commit,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generator,
    Opened,
    Started,
    TokenLogprobs,
)
from inference.engine.target import check_token_ids
from inference.errors import InvalidRequestError
from inference.model.decoder import check_seed, is_seed_invariant
from inference.request import (
    NO_DEFAULTS,
    GenerationRequest,
    Grammar,
    Preamble,
    Provenance,
    RequestDefaults,
    check_logit_bias,
)
from inference.text.chat import Chat
from inference.text.grammar_source import grammar_version
from inference.text.reasoning import is_begun, is_over
from inference.text.stop_strings import StopStrings
from inference.text.tokenizer import Tokenizer
from inference.workers.completion import CompletionRequest, Resume
from inference.workers.prompt import LocalCodec

_END_TOKENS = 16
"""Number of last tokens of a prompt that are searched for the mark of a reasoning."""
REPLAY_TOKENS = 256
"""Tokens of a resumed output that become text in one go: a few milliseconds in which no other request is served."""
SCORED_TOKENS = 32  # prompt tokens that get the texts of their log-probabilities in one go, for the same reason


class LocalCompleter:
    """`Completer` over a tokenizer and a generator.

    Args:
        defaults: values for what requests leave open.
        model_id: id of the target; if it is empty (unknown), no other server can continue the answers.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        defaults: RequestDefaults = NO_DEFAULTS,
        *,
        model_id: str = "",
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._model_id = model_id
        self.codec = LocalCodec(tokenizer, vocab_size=generator.vocab_size, max_length=generator.max_length)

    def switch_model(self, tokenizer: Tokenizer, defaults: RequestDefaults, model_id: str) -> None:
        """Switch to the model that the generator has now; its tokens are the same, its padding may differ."""
        self._tokenizer, self._defaults, self._model_id = tokenizer, defaults, model_id
        self.codec.tokenizer, self.codec.vocab_size = tokenizer, self._generator.vocab_size

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`."""
        is_open = bool(request.unsaid) or request.max_new_tokens is None
        request = request.resolved(self._defaults)
        prompt = request.prompt
        token_ids = self.codec.checked(prompt) if isinstance(prompt, tuple) else await self.codec.encode(prompt)
        generation = self._generation(request, token_ids)
        text = _Text(self._tokenizer, request)
        started = self._started(request, generation, self._defaults if is_open else None)
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
                    yield await self._opened(started, generation, request.resume, event)
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
        _check_rest(resume, f"max_new_tokens is {limit}" if len(resume.token_ids) >= limit else "")
        return replace(generation.resumed(resume.token_ids), provenance=resume.provenance)

    async def _opened(
        self, started: Started, generation: GenerationRequest, resume: Resume | None, opened: Opened
    ) -> Started:
        """Return Started with what the first pass made known, and with the model that committed the first tokens.

        Raises:
            IncompatibleDraftError: the request resumes, and this is another model.
        """
        if opened.provenance is not None:
            origin = replace(opened.provenance, prompt_digest=started.provenance.prompt_digest)
            if resume is not None:
                resume.provenance.require_same(origin)
            started = replace(started, provenance=origin)
        if generation.prompt_logprobs is not None:
            started = replace(started, prompt_logprobs=await self._of_prompt(generation, opened))
        return replace(started, num_cached_tokens=opened.num_cached_tokens)

    async def _of_prompt(self, generation: GenerationRequest, opened: Opened) -> tuple[TokenLogprobs, ...]:
        """Return the prompt's log-probabilities with their texts, and with the first token, which follows nothing.

        Lets the event loop run meanwhile: 2000 tokens, each with the 20 best ones, take 0.1 s.
        """
        first, *others = generation.prompt_token_ids
        if len(opened.prompt_logprobs) != len(others):
            message = "prompt_logprobs: the upstream target does not give them"
            raise InvalidRequestError(message, field="prompt_logprobs")
        stream = self._tokenizer.stream()
        entries = (TokenLogprobs((first,), (0.0,)), *opened.prompt_logprobs)
        named = []
        for i, each in enumerate(entries):
            named.append(_with_text(self._tokenizer, each, len(stream.push(each.token_ids[0]))))
            if i % SCORED_TOKENS == 0:
                await asyncio.sleep(0)
        return tuple(named)

    def _generation(self, request: CompletionRequest, prompt: tuple[int, ...]) -> GenerationRequest:
        if not prompt:
            raise InvalidRequestError("the prompt is empty: it has no token", field="prompt")
        check_logit_bias(request.sampling, vocab_size=self._generator.vocab_size)
        if request.seed is not None:
            check_seed(self._generator, request.sampling)
        seed = secrets.randbits(64) if request.seed is None else request.seed
        generation = GenerationRequest(
            prompt_token_ids=prompt,
            sampling=replace(request.sampling, seed=seed),
            max_new_tokens=max(1, request.max_new_tokens or 0),  # 0 reads the prompt, which a pass of one token does
            stop_token_ids=request.stop_token_ids,
            stop_at_eos=not request.ignore_eos,
            gamma=request.gamma,
            schedule=request.schedule,
            logprobs=request.logprobs,
            min_new_tokens=request.min_new_tokens,
            prompt_logprobs=request.prompt_logprobs,
            grammar=self._after_prompt(prompt, request.grammar),
            cache_salt=caller().cache_salt(request.cache_salt),
            include_rejected=request.include_rejected,
        )
        # A draft of a remote target must follow the same sampling, and only the tokenizer knows the end tokens.
        return replace(generation, sampling=generation.effective_sampling(self._tokenizer.eos_token_ids))

    def _after_prompt(self, prompt: tuple[int, ...], grammar: Grammar | None) -> Grammar | None:
        """Return the grammar with the preamble that the prompt leaves; it depends on the prompt alone, on no state."""
        if grammar is None or grammar.preamble is Preamble.NONE:
            return grammar
        end = self._tokenizer.decode(prompt[-_END_TOKENS:], special=True)
        if is_over(end):
            return replace(grammar, preamble=Preamble.NONE)
        return replace(grammar, preamble=Preamble.REST_OF_REASONING) if is_begun(end) else grammar


def _digest(token_ids: Sequence[int]) -> str:
    """Return 16 hex digits of SHA-256 over token ids, each as 32 bits, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()[:16]


def _with_text(tokenizer: Tokenizer, logprobs: TokenLogprobs, num_characters: int) -> TokenLogprobs:
    return replace(logprobs, texts=tuple(map(tokenizer.token_bytes, logprobs.token_ids)), num_characters=num_characters)


def _check_rest(resume: Resume, why_none: str) -> None:
    """Refuse to continue after tokens if there is a reason why nothing can follow."""
    if why_none:
        message = f"committed_token_ids: nothing more can follow these {len(resume.token_ids)}: {why_none}"
        raise InvalidRequestError(message, field="committed_token_ids")


class _Text:
    """Text of one request's output: detokenized, cut at stop strings, with the texts of log-probabilities."""

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest) -> None:
        self._tokenizer = tokenizer
        has_tools = isinstance(request.prompt, Chat) and request.prompt.tools_json
        self._stream = tokenizer.stream(tokenizer.call_markers if has_tools else {})
        self._stops = StopStrings(request.stop)

    async def replay(self, resume: Resume | None) -> None:
        """Restore the state of the text after resumed tokens; lets the event loop run meanwhile.

        Raises:
            InvalidRequestError: a stop string is complete, so that nothing can follow.
        """
        if resume is None:
            return
        for start in range(0, len(resume.token_ids), REPLAY_TOKENS):
            self._pieces(resume.token_ids[start : start + REPLAY_TOKENS])
            await asyncio.sleep(0)
        _check_rest(resume, "a stop string is among them" if self._stops.found else "")

    def delta(self, commit: Commit) -> Delta:
        """Return the commit with its text, cut after the token that completed a stop string."""
        pieces, lengths = self._pieces(commit.token_ids)
        rest = self._rest() if commit.finish_reason is not None else ""
        if pieces:
            pieces[-1] += rest
        cut = len(pieces) < len(commit.token_ids)
        return Delta(
            commit.position,
            commit.token_ids[: len(pieces)],
            # As after a stop token, there is no place for draft tokens, so they count neither way.
            num_draft_tokens=min(commit.num_draft_tokens, len(pieces)) if cut else commit.num_draft_tokens,
            num_accepted_tokens=min(commit.num_accepted_tokens, len(pieces)),
            timings=commit.timings,
            finish_reason=FinishReason.STOP if self._stops.found else commit.finish_reason,
            logprobs=tuple(map(partial(_with_text, self._tokenizer), commit.logprobs, lengths)),
            counts=commit.counts,
            own=commit.own.cut(len(pieces), commit.num_accepted_tokens) if cut else commit.own,
            text="".join(pieces) or rest,
            piece_lengths=tuple(map(len, pieces)),
            rejected_text="" if cut else self._tokenizer.text_of(commit.rejected_token_ids),
        )

    def _pieces(self, token_ids: Sequence[int]) -> tuple[list[str], list[int]]:
        """Return the text that each token adds, up to the one that completes a stop string.

        The second list counts the characters that each would add if no stop string held any back.
        """
        pieces: list[str] = []
        lengths: list[int] = []
        for token_id in token_ids:
            text = self._stream.push(token_id)
            pieces.append(self._stops.push(text))
            lengths.append(len(text))
            if self._stops.found:
                break
        return pieces, lengths

    def _rest(self) -> str:
        """Return the text still held back, once no further token can complete a character or a stop string."""
        return "" if self._stops.found else self._stops.push(self._stream.rest()) + self._stops.rest()
