"""A stream that outlives its gateway: every event has an id, and behind any of them another gateway goes on.

Tokens are a function of the request and its seed, so an answer that goes on is the whole answer, made again. What the
client has is not written a second time, but compared by its digest, before anything is written.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from inference.commit import Delta, Event, Started
from inference.errors import InvalidRequestError
from inference.gateway.errors import ApiError
from inference.gateway.event_id import EventId, digest_of, mismatch
from inference.gateway.formats import Format
from inference.gateway.requests import NOTHING_NEW, ChoiceEvent
from inference.gateway.schema import GenerationBody
from inference.gateway.stream import ChunkStream, StreamShape
from inference.request import MAX_SEED, Provenance
from inference.workers.completion import CompletionRequest

MAX_HELD_BYTES = 8 * 1024 * 1024
"""Of events of some choices that wait until the others have come to where they were."""
PING = b":\n\n"
"""A comment: an event would have a place in the answer."""
_USAGE = -1
"""In the place of a choice's index."""
Said: TypeAlias = tuple[Any, ...]
"""What is compared of an event: what it comes from, the token's id, text, and why the choice ends."""


def place_of(
    header: str | None, body: GenerationBody, requests: Sequence[CompletionRequest], answer: Format, *speech: Any
) -> EventId | None:
    """Where a stream begins, for a client that wants to resume it; None: for one that does not.

    Args:
        header: the request's Last-Event-ID; an empty one begins.
        speech: what else the answer's text depends on.

    Raises:
        ApiError: it cannot begin there.
    """
    if header and not body.stream:
        raise ApiError(400, "last-event-id: only a stream is resumed, and stream is not true", param="stream")
    if not body.stream or (header is None and not body.stream_options.resumable):
        return None
    first = requests[0]
    resolved = (first.sampling, first.max_new_tokens, first.grammar)
    asked = digest_of(body.model_dump(exclude_unset=True), resolved, speech)
    seed = secrets.randbits(64) if first.seed is None else first.seed
    beginning = EventId(seed, answer.answer_id, answer.created, asked, (0,) * (len(requests) + 1))
    return beginning.resumed(header) if header else beginning


def seeded(requests: Sequence[CompletionRequest], seed: int) -> list[CompletionRequest]:
    """Requests that draw no seeds of their own."""
    return [
        replace(request, seed=(seed + i) & MAX_SEED) if request.seed is None else request
        for i, request in enumerate(requests)
    ]


class ResumableStream(ChunkStream):
    """Server-sent events with ids, one per token, whatever the server's flags say: a pass has other tokens next time.

    Args:
        since: the place behind which they are written.
    """

    def __init__(self, answer: Format, shape: StreamShape, since: EventId) -> None:
        answer.answer_id, answer.created = since.answer_id, since.created
        super().__init__(answer, shape)
        self._since = since
        self._model_id = since.model_id
        self._counts = [0] * len(since.counts)
        self._digests = [""] * len(since.counts)
        self._origins: dict[int, Provenance] = {}
        self._is_level = not any(since.counts)  # with what the client has
        self._held: list[tuple[int, Said, bytes]] = []
        self._num_held_bytes = 0
        if since.counts[-1]:
            self._take(_USAGE, ())

    async def _beginning(self, events: AsyncGenerator[ChoiceEvent, None]) -> bytes:
        """Make again what the client has, and write what comes next.

        Raises:
            ApiError: 409: it is not the same; 400: nobody could make it again.
        """
        try:
            data = await super()._beginning(events)
            while not self._is_level:
                data += await self._encoded(*await anext(events))
        except StopAsyncIteration:
            raise mismatch("the answer ends before the place that the id names") from None
        except InvalidRequestError as exc:
            if exc.field == "seed":  # of a device's own noise, which keeps none
                raise _not_resumable() from exc
            raise
        return data

    def _encode(self, index: int, event: Event) -> bytes:
        if event is NOTHING_NEW:
            return PING
        if isinstance(event, Started):
            self._check_model(event.provenance.model_id)
            self._origins[index] = event.provenance
        token_ids = iter(event.token_ids if isinstance(event, Delta) else ())
        choice, data = self._choices[index], b""
        for part in choice.take(event, per_token=True):
            said = (self._origins[index], next(token_ids, None), part.text, part.finish_reason)
            data += self._placed(index, said, self._chunk(index, part, choice))
        return data

    def _check_model(self, model_id: str) -> None:
        if not model_id:
            raise _not_resumable()
        if self._model_id not in ("", model_id):
            raise mismatch(f"it was begun by model {self._model_id}, here is {model_id}")
        self._model_id = model_id

    def _placed(self, index: int, said: Said, data: bytes) -> bytes:
        """What is to be written once an event is known: it, nothing yet, or all that has waited."""
        if self._is_level:
            return self._written(index, said, data)
        if self._counts[index] == self._since.counts[index]:
            self._hold(index, said, data)
            return b""
        self._take(index, said)
        return self._released() if tuple(self._counts) == self._since.counts else b""

    def _hold(self, index: int, said: Said, data: bytes) -> None:
        self._num_held_bytes += len(data)
        if self._num_held_bytes > MAX_HELD_BYTES:
            raise mismatch(f"its choices are more than {MAX_HELD_BYTES} bytes apart")
        self._held.append((index, said, data))

    def _released(self) -> bytes:
        if digest_of(*self._digests) != self._since.said:
            raise mismatch("here the answer has become another one")
        self._is_level = True
        held, self._held = self._held, []
        return b"".join(self._written(*each) for each in held)

    def _written(self, index: int, said: Said, data: bytes) -> bytes:
        self._take(index, said)
        place = replace(
            self._since, counts=tuple(self._counts), said=digest_of(*self._digests), model_id=self._model_id
        )
        return f"id: {place}\n".encode() + data

    def _take(self, index: int, said: Said) -> None:
        self._counts[index] += 1
        self._digests[index] = digest_of(self._digests[index], said)

    def _ending(self) -> bytes:
        data = super()._ending()
        return self._written(_USAGE, (), data) if data and not self._counts[_USAGE] else b""


def _not_resumable() -> ApiError:
    fault = "nobody could go on with this stream: its server draws its noise on a device, or names no model"
    return ApiError(400, f"stream_options.resumable: {fault}", param="stream_options", code="not_resumable")
