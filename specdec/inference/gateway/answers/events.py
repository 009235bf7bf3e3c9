"""Base class for answers of the APIs whose streams have named events: /v1/responses and /v1/messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import count
from typing import Any, TypeAlias

from specdec.inference.gateway.answers.documents import encoded
from specdec.inference.gateway.answers.errors import ApiError
from specdec.inference.gateway.answers.formats import ChatFormat
from specdec.inference.gateway.answers.message import MessageReader
from specdec.inference.gateway.answers.parts import Choice, ChoiceEvent, Part
from specdec.inference.gateway.answers.stream import AnswerStream

JsonEvent: TypeAlias = dict[str, Any]
"""Event of a stream; its "type" is also the name under which it is sent."""


class EventFormat(AnswerStream):
    """Answer in the form of an API with named events, made of a chat answer's parts.

    A streamed answer is a sequence of events, an unstreamed one the single object that these events add up to.

    Args:
        model: name of the model that the answer names.
        reader: function that takes the prompt's text and returns a reader, which splits the answer into reasoning,
            content and tool calls; the function returns None if the answer can only be content.

    Attributes:
        is_numbered: True if events have a "sequence_number".
    """

    last_word = b""
    is_numbered = False

    def __init__(self, model: str, reader: Callable[[str], MessageReader | None]) -> None:
        super().__init__()
        self._chat = ChatFormat(model, reader)
        self._numbers = count()

    def opening(self) -> Iterable[JsonEvent]:
        """Return the events that open the stream, before any part of the answer is known; none by default."""
        return ()

    @abstractmethod
    def add(self, part: Part, choice: Choice) -> Iterator[JsonEvent]:
        """Add a part of the answer; yield the events for the client.

        Args:
            choice: counts of the answer: up to this part, or of all of it if the answer is not streamed.
        """

    @abstractmethod
    def closing(self, choice: Choice) -> Iterator[JsonEvent]:
        """Complete the answer, whose counts `choice` has; yield the events for the client."""

    @abstractmethod
    def failing(self, error: ApiError) -> Iterator[JsonEvent]:
        """End the answer by a failure; yield the events for the client."""

    @abstractmethod
    def ended(self, choice: Choice) -> dict[str, Any]:
        """Return the whole answer as one object, once its last part was added."""

    def document(self) -> dict[str, Any]:
        """Return the JSON document of the whole answer, if it is not streamed."""
        (choice,) = self.choices  # these APIs have no more
        for part in choice.parts:
            list(self.add(part, choice))
        list(self.closing(choice))
        return self.ended(choice)

    async def begun(self, events: AsyncGenerator[ChoiceEvent, None]) -> bytes:
        """Return the bytes of the events that open the stream, and of those for the first event of the completion."""
        return self._encoded_events(self.opening()) + await super().begun(events)

    def _part(self, index: int, part: Part, choice: Choice) -> bytes:
        return self._encoded_events(self.add(part, choice))

    def _end(self) -> bytes:
        return self._encoded_events(self.closing(self.choices[0]))

    def _failure(self, error: ApiError) -> bytes:
        return self._encoded_events(self.failing(error))

    def _encoded_events(self, events: Iterable[JsonEvent]) -> bytes:
        if self.is_numbered:
            events = ({**event, "sequence_number": next(self._numbers)} for event in events)
        return b"".join(f"event: {event['type']}\ndata: {encoded(event)}\n\n".encode() for event in events)
