"""Text in, text out: what clients, servicers and the command line share, wherever the tokens come from.

A `Completer` is the one interface of every topology. `LocalCompleter` puts a tokenizer around a `Generator` of this
process; `RemoteCompleter` (client.py) reaches any GenerationService.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from inference.capabilities import check_seed
from inference.errors import InvalidRequestError
from inference.profile import Profile
from inference.stats import RequestStats
from inference.stop_strings import StopStrings, check_stops
from inference.tokenizer import Tokenizer
from inference.types import (
    Commit,
    FinishReason,
    GenerationRequest,
    Generator,
    SamplingParams,
    Schedule,
    Timings,
    TokenLogprob,
    TokenLogprobs,
)

DEFAULT_MAX_NEW_TOKENS = 128
MAX_INLINE_CHARACTERS = 20_000
"""Longer prompts are tokenized on a thread: megabytes take seconds, in which nobody else would be served."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to answer, as (role, content) pairs."""

    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What a client asks for.

    Attributes:
        prompt: text, token ids taken as they are, or a conversation.
        seed: None lets the server draw one; `sampling.seed` is ignored.
        stop_token_ids: beside the model's own end-of-sequence ids, which `ignore_eos` switches off.
        gamma, schedule, logprobs: see `GenerationRequest`.
        stop: strings before which the text ends.
        echo: give the prompt's text in Started.

    Raises:
        InvalidRequestError: `stop` is beyond its limits.
    """

    prompt: str | tuple[int, ...] | Chat
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    gamma: int | None = None
    schedule: Schedule | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        check_stops(self.stop)

    @property
    def label(self) -> str:
        """A short name for tables."""
        if isinstance(self.prompt, Chat):
            return self.prompt.messages[-1][1] if self.prompt.messages else ""
        return self.prompt if isinstance(self.prompt, str) else f"{len(self.prompt)} token ids"


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    num_prompt_tokens: int
    seed: int
    prompt_text: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that became final together, and their text; see `Commit`. The last one may have text alone.

    Attributes:
        piece_lengths: how many characters of `text` each token added.
    """

    token_ids: tuple[int, ...]
    text: str
    num_draft_tokens: int
    num_accepted_tokens: int
    timings: Timings
    piece_lengths: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None

    def pieces(self) -> list[str]:
        """The text that each token added."""
        ends = list(itertools.accumulate(self.piece_lengths, initial=0))
        return [self.text[start:end] for start, end in itertools.pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence is complete."""

    reason: FinishReason


Event: TypeAlias = Started | Delta | Finished


class Completer(Protocol):
    """Serves completion requests."""

    def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """Yield one Started, one Delta per commit, one Finished; closing the iterator cancels the request."""


class ProfilingCompleter:
    """A completer that keeps a record of every request, as this process sees it."""

    def __init__(self, completer: Completer, profile: Profile) -> None:
        self._completer = completer
        self._profile = profile

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`."""
        stats = RequestStats()
        self._profile.add(request.label, stats)
        async with aclosing(self._completer.complete(request)) as events:
            async for event in events:
                if isinstance(event, Started):
                    stats.num_prompt_tokens = event.num_prompt_tokens
                elif isinstance(event, Delta):
                    stats.record(len(event.token_ids), event.num_draft_tokens, event.num_accepted_tokens, event.timings)
                yield event


class LocalCompleter:
    """A tokenizer around a generator."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer) -> None:
        self._generator = generator
        self._tokenizer = tokenizer

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`."""
        generation = self._generation(request, await self._prompt(request.prompt))
        output = _Output(self._tokenizer, request.stop)
        started: Started | None = self._started(request, generation)
        async with aclosing(self._generator.generate(generation)) as commits:
            async for commit in commits:
                if started is not None:  # only now: a request that is refused has never started
                    yield started
                    started = None
                delta = output.delta(commit)
                if delta.token_ids or delta.text:
                    yield delta
                if delta.finish_reason is not None:
                    yield Finished(delta.finish_reason)
                    return  # a stop string ends the text here; what goes on underneath is cancelled

    def _started(self, request: CompletionRequest, generation: GenerationRequest) -> Started:
        token_ids, text = generation.prompt_token_ids, ""
        if request.echo:
            text = request.prompt if isinstance(request.prompt, str) else self._tokenizer.decode(token_ids)
        return Started(len(token_ids), generation.sampling.seed, text)

    async def _prompt(self, prompt: str | tuple[int, ...] | Chat) -> tuple[int, ...]:
        if isinstance(prompt, tuple):
            return prompt
        length = len(prompt) if isinstance(prompt, str) else sum(len(text) for _, text in prompt.messages)
        if length > MAX_INLINE_CHARACTERS:
            return await asyncio.to_thread(self._encode, prompt)
        return self._encode(prompt)

    def _encode(self, prompt: str | Chat) -> tuple[int, ...]:
        if isinstance(prompt, Chat):
            return self._tokenizer.encode_chat(prompt.messages)
        return self._tokenizer.encode(prompt)

    def _generation(self, request: CompletionRequest, prompt: tuple[int, ...]) -> GenerationRequest:
        if not prompt:
            raise InvalidRequestError("the prompt is empty: it has no token")
        check_logit_bias(request.sampling, vocab_size=self._generator.vocab_size)
        if request.seed is not None:
            check_seed(self._generator, request.sampling)
        seed = secrets.randbits(64) if request.seed is None else request.seed
        return GenerationRequest(
            prompt_token_ids=prompt,
            sampling=replace(request.sampling, seed=seed),
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            stop_at_eos=not request.ignore_eos,
            gamma=request.gamma,
            schedule=request.schedule,
            logprobs=request.logprobs,
        )


def check_logit_bias(sampling: SamplingParams, *, vocab_size: int) -> None:
    """Refuse biases of tokens that do not exist.

    Raises:
        InvalidRequestError: naming the token.
    """
    for token_id, _ in sampling.logit_bias:
        if token_id >= vocab_size:
            raise InvalidRequestError(f"logit_bias names token {token_id}, outside the vocabulary of {vocab_size}")


class _Output:
    """Makes deltas of one request's commits: text, stop strings, and what log-probabilities are called."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream()
        self._stops = StopStrings(stops)

    def delta(self, commit: Commit) -> Delta:
        """The commit with its text, cut behind the token that completed a stop string."""
        pieces, lengths = self._pieces(commit.token_ids)
        rest = self._rest() if commit.finish_reason is not None else ""
        if pieces:
            pieces[-1] += rest
        cut = len(pieces) < len(commit.token_ids)
        return Delta(
            token_ids=commit.token_ids[: len(pieces)],
            text="".join(pieces) or rest,
            # As behind a stop token: there is no place for draft tokens, so they count neither way.
            num_draft_tokens=min(commit.num_draft_tokens, len(pieces)) if cut else commit.num_draft_tokens,
            num_accepted_tokens=min(commit.num_accepted_tokens, len(pieces)),
            timings=commit.timings,
            piece_lengths=tuple(map(len, pieces)),
            logprobs=tuple(map(self._with_text, commit.logprobs, lengths)),
            finish_reason=FinishReason.STOP if self._stops.found else commit.finish_reason,
        )

    def _pieces(self, token_ids: tuple[int, ...]) -> tuple[list[str], list[int]]:
        """What each token adds to the text, up to the one that completes a stop string.

        Also how many characters it would add if no stop string held any back.
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
        """What the end of the sequence makes certain."""
        return "" if self._stops.found else self._stops.push(self._stream.rest()) + self._stops.rest()

    def _with_text(self, logprobs: TokenLogprobs, num_characters: int) -> TokenLogprobs:
        return TokenLogprobs(self._named(logprobs.chosen), tuple(map(self._named, logprobs.top)), num_characters)

    def _named(self, token: TokenLogprob) -> TokenLogprob:
        return replace(token, text=self._tokenizer.token_bytes(token.token_id))
