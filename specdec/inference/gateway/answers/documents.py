"""JSON bodies of answers that have no other module (errors, models, version), and the encoding of all bodies.

JSON is escaped to ASCII, because some clients take U+2028 or U+0085 for the end of a line and would cut an event in
two, and because UTF-8 cannot encode half of a surrogate pair, which a client may have sent as a name.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel
from starlette.responses import JSONResponse

from specdec.inference.workers.completion import ModelCard

encoded = json.JSONEncoder(separators=(",", ":")).encode
"""Function that returns a document as compact JSON."""


class JsonAnswer(JSONResponse):
    """HTTP answer that is one JSON document."""

    def render(self, content: Any) -> bytes:
        """Return the document `content` as bytes of JSON; called by Starlette."""
        return encoded(content).encode()


class ErrorDetail(BaseModel):
    """Description of an error in OpenAI's API: the value of `error` in an `ErrorDocument`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(BaseModel):
    """Body of every answer with an error status, except at /v1/messages and below."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """Description of an error in Anthropic's API: the value of `error` in a `MessagesErrorDocument`."""

    type: str
    message: str


class MessagesErrorDocument(BaseModel):
    """Body of every answer with an error status at /v1/messages and below."""

    type: Literal["error"]
    error: MessagesErrorDetail


_Responses: TypeAlias = dict[int | str, dict[str, Any]]
_ERROR = "An error, by its HTTP status (docs/gateway.md); Retry-After says when to try again."
FAILURES: _Responses = {"default": {"model": ErrorDocument, "description": _ERROR}}
MESSAGES_FAILURES: _Responses = {"default": {"model": MessagesErrorDocument, "description": _ERROR}}
ANSWERS: _Responses = {
    200: {
        "description": "OpenAI's object; with `stream`, server-sent events with its chunks.",
        "content": {"text/event-stream": {}},
    },
    **FAILURES,
}


class Model(BaseModel):
    """Entry of /v1/models for the served model, or for one of its adapters.

    `max_model_len`: most tokens of prompt and output together. `model_id`: hash of all that the model's tokens depend
    on; empty if it is unknown. `parent`: for an adapter, the name of its model. `has_chat_template`: whether the model
    has a template of its own for conversations.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specdec"
    root: str
    parent: str | None = None
    max_model_len: int
    model_id: str
    has_chat_template: bool

    @classmethod
    def of(cls, card: ModelCard, *, created: int, parent: str | None = None) -> Model:
        name, length = card.name, card.max_length
        return cls(
            id=name,
            created=created,
            root=name,
            parent=parent,
            max_model_len=length,
            model_id=card.model_id,
            has_chat_template=card.chat_template is not None,
        )


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]

    @classmethod
    def of(cls, card: ModelCard, *, created: int) -> ModelList:
        adapters = (card.of_adapter(name) for name in card.adapters)
        base = Model.of(card, created=created)
        return cls(data=[base, *(Model.of(each, created=created, parent=card.name) for each in adapters)])


class Version(BaseModel):
    """Answer of /version."""

    version: str
    topology: str
