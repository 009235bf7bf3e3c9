"""HTTP answers made of a completion's events: one JSON document, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specdec.inference.commit import TextEvent
from specdec.inference.errors import CapacityError, SpecDecError
from specdec.inference.gateway.answers.documents import JsonAnswer
from specdec.inference.gateway.answers.errors import ApiError, from_error, unexpected
from specdec.inference.gateway.answers.parts import Choice, ChoiceEvent, Part
from specdec.inference.workers.calls.convert import converted

logger = logging.getLogger(__name__)

_NO_BUFFERING = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
LAST_WORD_S = 1.0
"""Seconds after the deadline in which a stream can still tell its client that the time is over."""


MAX_SCORES = 200_000
"""Most log-probabilities in an answer that is not streamed; each takes half a kilobyte until the answer is sent."""
MAX_ALL_SCORES = 1_000_000
"""Most log-probabilities in all of this process's unfinished answers that are not streamed, together."""
INLINE_SCORES = 5000
"""Most log-probabilities of a document that the event loop encodes; a thread encodes more, as that takes long."""


@dataclass(slots=True)
class Kept:
    """Count of the log-probabilities in memory for all unfinished answers that are not streamed."""

    num_scores: int = 0


async def whole_answer(events: AsyncGenerator[ChoiceEvent, None], answer: AnswerStream, kept: Kept) -> JsonAnswer:
    """Read all events of a request that does not stream; return the answer with its JSON document.

    Args:
        answer: form of the answer; the events are counted in its choices.
        kept: count of all unfinished answers' log-probabilities in this process; this answer's are added to it, and
            are subtracted when this function returns or raises.

    Raises:
        ApiError: the answer has more than `MAX_SCORES` log-probabilities.
        CapacityError: all unfinished answers together have more than `MAX_ALL_SCORES`.
    """
    num_scores = 0

    def document() -> JsonAnswer:
        return JsonAnswer(answer.document())

    try:
        async with aclosing(events):
            async for index, event in events:
                choice = answer.choices[index]
                for part in choice.take(event, per_token=answer.per_token):
                    choice.parts.append(part)
                    num_new = sum(len(scores.token_ids) for scores in part.logprobs)
                    num_scores, kept.num_scores = num_scores + num_new, kept.num_scores + num_new
                    _check_scores(num_scores, kept)
        return document() if num_scores <= INLINE_SCORES else await asyncio.to_thread(document)
    finally:
        kept.num_scores -= num_scores


def _check_scores(num_scores: int, kept: Kept) -> None:
    if num_scores > MAX_SCORES:
        message = f"logprobs: the answer has more than {MAX_SCORES}; stream it, or ask for fewer choices or tokens"
        raise ApiError(400, message, param="logprobs", code="invalid_value")
    if num_scores and kept.num_scores > MAX_ALL_SCORES:
        message = f"logprobs: unfinished answers of this server hold more than {MAX_ALL_SCORES}; stream, or try again"
        raise CapacityError(message, retry_after_s=5.0)


class AnswerStream(ABC):
    """Answer to one request, as a stream of server-sent events or as one document; a subclass defines the form.

    Attributes:
        choices: choices of the request so far; a single one unless a subclass expects more.
        last_word: bytes that end the stream.
        shows_prompt: True if an echoed prompt is a part of the answer.
        per_token: True to put the answer together token by token, False to do it by target passes.
    """

    last_word = b"data: [DONE]\n\n"
    shows_prompt = False
    per_token = True

    def __init__(self) -> None:
        self.choices = [Choice(shows_prompt=self.shows_prompt)]

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Return the JSON document of the whole answer, if it is not streamed."""

    @abstractmethod
    def _part(self, index: int, part: Part, choice: Choice) -> bytes:
        """Return the server-sent events for one part of the text of `choice`, which has the number `index`."""

    @abstractmethod
    def _end(self) -> bytes:
        """Return the server-sent events that follow the last part, such as one with the usage."""

    @abstractmethod
    def _failure(self, error: ApiError) -> bytes:
        """Return the server-sent events that report a failure to the client."""

    async def begun(self, events: AsyncGenerator[ChoiceEvent, None]) -> bytes:
        """Wait for the completion's first event, and return the bytes that the stream sends for it.

        A failure before it closes `events` and is raised, so that the answer can have an error status.
        """
        try:
            return await self._encoded(*await anext(events))
        except BaseException:
            await events.aclose()
            raise

    async def chunks(self, first: bytes, events: AsyncGenerator[ChoiceEvent, None]) -> AsyncGenerator[bytes, None]:
        """Yield `first` and the bytes for all later events; a failure from here on is reported within the stream."""
        async with aclosing(events):
            try:
                if first:
                    yield first
                async for index, event in events:
                    if data := await self._encoded(index, event):
                        yield data  # the chunks of one pass in one write
            except SpecDecError as exc:
                yield self._failure(from_error(exc))
            except ApiError as exc:
                yield self._failure(exc)
            except Exception:
                logger.exception("a stream failed unexpectedly")
                yield self._failure(unexpected())
            else:
                if end := self._end():
                    yield end
            if self.last_word:
                yield self.last_word

    async def _encoded(self, index: int, event: TextEvent) -> bytes:
        """Return the bytes for an event; a thread encodes a prompt's log-probabilities, since that takes long."""
        return await converted(partial(self._encode, index), event, getattr(event, "prompt_logprobs", ()))

    def _encode(self, index: int, event: TextEvent) -> bytes:
        choice = self.choices[index]
        return b"".join(self._part(index, part, choice) for part in choice.take(event, per_token=self.per_token))


class EventStream(StreamingResponse):
    """HTTP response that sends a stream of server-sent events to the client.

    However the response ends, it closes `chunks` and `events`, which ends the request: also before the first chunk, and
    at the deadline, when a write may still wait for a client that does not read.

    Args:
        chunks: chunks of an `AnswerStream`.
        events: source of the chunks.
        deadline_s: seconds from now to the request's deadline.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], events: AsyncGenerator[ChoiceEvent, None], *, deadline_s: float
    ) -> None:
        super().__init__(chunks, headers=_NO_BUFFERING)
        self._sources = (chunks, events)
        self._ends_at = asyncio.get_running_loop().time() + deadline_s + LAST_WORD_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send as Starlette does, with a deadline; then close the sources."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._ends_at):
                    await super().__call__(scope, receive, send)
        finally:
            for source in self._sources:
                await source.aclose()
