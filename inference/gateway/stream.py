"""From events to what goes out: one JSON document, or server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from inference.errors import SpecDecError
from inference.gateway.choice import Choice, Part
from inference.gateway.documents import encoded
from inference.gateway.errors import ApiError, from_error, unexpected
from inference.gateway.formats import Format, usage
from inference.gateway.requests import ChoiceEvent

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


async def whole_answer(
    events: AsyncGenerator[ChoiceEvent, None], answer: Format, *, num_choices: int, n: int
) -> dict[str, Any]:
    """The document of a request that does not stream."""
    choices = [Choice(shows_prompt=answer.shows_prompt) for _ in range(num_choices)]
    async with aclosing(events):
        async for index, event in events:
            for part in choices[index].take(event, per_token=False):
                choices[index].keep(part)
    entries = [answer.choice(index, choice) for index, choice in enumerate(choices)]
    return {**answer.head(chunk=False), "choices": entries, "usage": usage(choices, n=n)}


class ChunkStream:
    """Server-sent events of one request.

    Args:
        num_choices, n: sequences in all, and per prompt.
        per_token: one event per token; else one per target pass.
        include_usage: a last chunk with the usage, as OpenAI has it; the others then carry a null.
        continuous_usage: these others carry the usage so far.
        include_speculation: say which tokens are accepted draft tokens.
    """

    def __init__(
        self,
        answer: Format,
        *,
        num_choices: int,
        n: int,
        per_token: bool,
        include_usage: bool,
        continuous_usage: bool,
        include_speculation: bool,
    ) -> None:
        self._answer = answer
        self._n = n
        self._per_token = per_token
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._include_speculation = include_speculation
        self._choices = [Choice(shows_prompt=answer.shows_prompt) for _ in range(num_choices)]
        head = encoded(answer.head(chunk=True)).removesuffix("}")
        self._head = f'data: {head},"choices":['  # the same for every chunk, so it is written once

    async def chunks(
        self, first: ChoiceEvent, events: AsyncGenerator[ChoiceEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        """All events, beginning with `first`; what fails now can only be told in the stream."""
        async with aclosing(events):
            try:
                if data := self._encode(*first):
                    yield data
                async for index, event in events:
                    if data := self._encode(index, event):
                        yield data  # the chunks of one pass in one write
            except SpecDecError as exc:
                yield _failure(from_error(exc))
            except Exception:
                logger.exception("a stream failed unexpectedly")
                yield _failure(unexpected())
            else:
                if self._include_usage:
                    yield self._event("", {"usage": self._usage()})
            yield DONE

    def _encode(self, index: int, event: Any) -> bytes:
        choice = self._choices[index]
        return b"".join(self._chunk(index, part, choice) for part in choice.take(event, per_token=self._per_token))

    def _chunk(self, index: int, part: Part, choice: Choice) -> bytes:
        beside: dict[str, Any] = {}
        if self._include_usage:
            beside["usage"] = self._usage() if self._continuous_usage else None
        if self._include_speculation:
            beside["speculation"] = {"accepted": part.accepted, "num_draft_tokens": part.num_draft_tokens}
        return self._event(encoded(self._answer.chunk(index, part, choice)), beside)

    def _event(self, choice: str, beside: dict[str, Any]) -> bytes:
        tail = "," + encoded(beside).removeprefix("{") if beside else "}"
        return f"{self._head}{choice}]{tail}\n\n".encode()

    def _usage(self) -> dict[str, Any]:
        return usage(self._choices, n=self._n)


def _failure(error: ApiError) -> bytes:
    return f"data: {encoded(error.body())}\n\n".encode()
