"""The requests that every variant gets: equal prompts, exactly so many tokens in and out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from inference.cli.prompts.results import Result
from inference.cli.prompts.source import read_prompts
from inference.errors import SpecDecError
from inference.request import SamplingParams
from inference.text.tokenizer import Tokenizer
from inference.workers.completion import Completer, CompletionRequest


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked, and how.

    Attributes:
        prompts: (kind, token ids) of each request.
        output_tokens: of every answer; an end of the sequence does not end it.
        concurrency: requests in flight at once.
        deadline_s: of one request.
    """

    prompts: Sequence[tuple[str, tuple[int, ...]]]
    output_tokens: int
    concurrency: int
    temperature: float
    deadline_s: float

    def request(self, index: int) -> CompletionRequest:
        """The one with this number, which is the seed of a sampled one: variants can be held against each other."""
        return CompletionRequest(
            self.prompts[index][1],
            SamplingParams(temperature=self.temperature),
            seed=index if self.temperature else None,
            max_new_tokens=self.output_tokens,
            ignore_eos=True,
        )


def prompts_of(file: Path, tokenizer: Tokenizer, *, num_tokens: int, number: int) -> list[tuple[int, ...]]:
    """Prompts of exactly `num_tokens`: the lines of a file one behind the other, each time from another line on."""
    lines = read_prompts(None, file)
    prompts = []
    for index in range(number):
        start = index % len(lines)
        token_ids = tokenizer.encode("\n".join([*lines[start:], *lines[:start]]))
        prompts.append((token_ids * (num_tokens // len(token_ids) + 1))[:num_tokens])
    return prompts


async def run(load: Load, completer: Completer) -> list[Result]:
    """All requests, after one that warms up; results in their order. One that fails says so in its result."""
    await _complete(completer, load, 0)
    places = asyncio.Semaphore(load.concurrency)

    async def one(index: int) -> Result:
        async with places:
            return await _complete(completer, load, index)

    return list(await asyncio.gather(*(one(index) for index in range(len(load.prompts)))))


async def _complete(completer: Completer, load: Load, index: int) -> Result:
    result = Result(load.prompts[index][0])
    try:
        async with aclosing(completer.complete(load.request(index))) as events:
            async for event in events:
                result.record(event)
    except SpecDecError as error:
        result.error = error
    return result
