"""Text in, text out: what clients, servicers and the command line share, wherever the tokens come from.

A `Completer` is the one interface of every topology. `LocalCompleter` puts a tokenizer around a `Generator` of this
process; `RemoteCompleter` (client.py) reaches any GenerationService.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from inference.errors import InvalidRequestError
from inference.profile import Profile
from inference.stats import RequestStats
from inference.tokenizer import Tokenizer
from inference.types import FinishReason, GenerationRequest, Generator, SamplingParams, Schedule, Timings

DEFAULT_MAX_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What a client asks for.

    Attributes:
        prompt: text, or token ids taken as they are.
        seed: None lets the server draw one; `sampling.seed` is ignored.
        stop_token_ids: beside the model's own end-of-sequence ids, which `ignore_eos` switches off.
        gamma, schedule: see `GenerationRequest`.
    """

    prompt: str | tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    gamma: int | None = None
    schedule: Schedule | None = None

    @property
    def label(self) -> str:
        """A short name for tables."""
        return self.prompt if isinstance(self.prompt, str) else f"{len(self.prompt)} token ids"


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    num_prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that became final together, and their text; see `Commit`. The last one may have text alone."""

    token_ids: tuple[int, ...]
    text: str
    num_draft_tokens: int
    num_accepted_tokens: int
    timings: Timings


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
        generation = self._generation(request)
        text = self._tokenizer.stream()
        started: Started | None = Started(len(generation.prompt_token_ids), generation.sampling.seed)
        async with aclosing(self._generator.generate(generation)) as commits:
            async for commit in commits:
                if started is not None:  # only now: a request that is refused has never started
                    yield started
                    started = None
                piece = text.push(commit.token_ids, last=commit.finish_reason is not None)
                if commit.token_ids or piece:
                    yield Delta(
                        commit.token_ids, piece, commit.num_draft_tokens, commit.num_accepted_tokens, commit.timings
                    )
                if commit.finish_reason is not None:
                    yield Finished(commit.finish_reason)

    def _generation(self, request: CompletionRequest) -> GenerationRequest:
        prompt = self._tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        if not prompt:
            raise InvalidRequestError("the prompt is empty: it has no token")
        seed = secrets.randbits(64) if request.seed is None else request.seed
        eos = frozenset() if request.ignore_eos else self._tokenizer.eos_token_ids
        return GenerationRequest(
            prompt_token_ids=prompt,
            sampling=replace(request.sampling, seed=seed),
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids | eos,
            gamma=request.gamma,
            schedule=request.schedule,
        )
