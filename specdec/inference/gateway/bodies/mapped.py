"""Bodies of other APIs than OpenAI's chat, each of which is mapped onto the body of a chat."""

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
    """Body with the sampling parameters and template variables of a chat's, and a form of its own for the rest.

    Attributes:
        conversation_field: name of the field that becomes the messages of a chat.
    """

    conversation_field: ClassVar[str]

    def chat(self) -> ChatBody:
        """Return the body of the same request for /v1/chat/completions.

        Raises:
            RequestValidationError: the parts do not fit each other.
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
        """Yield the fields of a chat's body that this API has in another form."""

    def _place(self, place: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """Translate the path of a wrong field in a chat's body to this body; within messages, only to their field."""
        return ("body", self.conversation_field) if place[:1] == ("messages",) else ("body", *place)


def add_result(messages: list[dict[str, Any]], call_id: str, text: str) -> None:
    """Add the result of a call to the messages of a chat, with the function's name if the call is among them."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    names = {call["id"]: call["function"]["name"] for call in calls}
    name = {"name": names[call_id]} if call_id in names else {}
    messages.append({"role": "tool", "tool_call_id": call_id, "content": text, **name})


def text_of(content: str | list[Any]) -> str:
    """Return a content as one text: the texts of its parts, one a line."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def format_of_chat(form: Body) -> dict[str, Any]:
    """Return the format of a text as a chat's body has it, with an object around the schema."""
    fields = form.model_dump(by_alias=True, exclude_unset=True)
    return {"type": fields.pop("type"), **({"json_schema": fields} if fields else {})}
