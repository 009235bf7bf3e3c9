"""From events to what goes out: one JSON document, or server-sent events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from inference.errors import SpecDecError
from inference.gateway.choices import ChoiceEvent
from inference.gateway.errors import ApiError, from_error
from inference.gateway.formats import Format, usage
from inference.gateway.parts import Choice, Part

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


async def whole_answer(
    events: AsyncGenerator[ChoiceEvent, None], answer: Format, *, num_choices: int, n: int
) -> dict[str, Any]:
    """The document of a request that does not stream."""
    choices = [Choice() for _ in range(num_choices)]
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
        include_speculation: bool,
    ) -> None:
        self._answer = answer
        self._n = n
        self._per_token = per_token
        self._include_usage = include_usage
        self._include_speculation = include_speculation
        self._choices = [Choice() for _ in range(num_choices)]
        self._head = answer.head(chunk=True)

    async def encoded(
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
                yield _event(from_error(exc).body())
            except Exception:
                logger.exception("a stream failed unexpectedly")
                yield _event(ApiError(500, "unexpected failure; the server's log has the cause", "server_error").body())
            else:
                if self._include_usage:
                    yield _event({**self._head, "choices": [], "usage": usage(self._choices, n=self._n)})
            yield DONE

    def _encode(self, index: int, event: Any) -> bytes:
        choice = self._choices[index]
        return b"".join(
            _event(self._chunk(index, part, choice)) for part in choice.take(event, per_token=self._per_token)
        )

    def _chunk(self, index: int, part: Part, choice: Choice) -> dict[str, Any]:
        chunk = {**self._head, "choices": [self._answer.chunk(index, part, choice)]}
        if self._include_usage:
            chunk["usage"] = None
        if self._include_speculation:
            chunk["speculation"] = {"accepted": part.accepted, "num_draft_tokens": part.num_draft_tokens}
        return chunk


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
