"""Base class of bodies that are turned into the body of a chat: those of /v1/responses and /v1/messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from specdec.inference.gateway.bodies.body import Body
from specdec.inference.gateway.bodies.conversation import TemplateBody
from specdec.inference.gateway.bodies.schema import ChatBody, GenerationBody


class MappedBody(GenerationBody, TemplateBody):
    """Body of an API that has a chat's sampling parameters and template variables, and other fields for the rest.

    Attributes:
        conversation_field: name of the field that becomes the chat's messages.
    """

    conversation_field: ClassVar[str]

    def chat(self) -> ChatBody:
        """Return the body of the same request for /v1/chat/completions.

        Raises:
            RequestValidationError: the result is not valid as a chat, such as a choice of a tool that is missing.
        """
        shared = {*GenerationBody.model_fields, *TemplateBody.model_fields} & self.model_fields_set
        fields = self.model_dump(include=shared - {"stream_options"}, by_alias=True, exclude_unset=True)
        try:
            return ChatBody.model_validate({**fields, **dict(self._mapped())})
        except ValidationError as exc:
            faults = [{**fault, "loc": self._place(fault["loc"])} for fault in exc.errors()]
            raise RequestValidationError(faults, body=self.model_dump(by_alias=True)) from exc

    @abstractmethod
    def _mapped(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of the chat's fields that this body has in another form."""

    def _place(self, place: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """Return the path in this body that leads to the wrong field at `place` in the chat's body.

        For a fault within the messages it leads to the field that they were made of, not into it.
        """
        return ("body", self.conversation_field) if place[:1] == ("messages",) else ("body", *place)


def add_result(messages: list[dict[str, Any]], call_id: str, text: str) -> None:
    """Add a tool's result to a chat's messages; if the call that it answers is among them, name its function too."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    names = {call["id"]: call["function"]["name"] for call in calls}
    name = {"name": names[call_id]} if call_id in names else {}
    messages.append({"role": "tool", "tool_call_id": call_id, "content": text, **name})


def text_of(content: str | list[Any]) -> str:
    """Return a message's content as one text: if it is a list of parts, their texts, joined by newlines."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def format_of_chat(form: Body) -> dict[str, Any]:
    """Return the output format of another API as a chat's `response_format`, which has the schema in `json_schema`."""
    fields = form.model_dump(by_alias=True, exclude_unset=True)
    return {"type": fields.pop("type"), **({"json_schema": fields} if fields else {})}
