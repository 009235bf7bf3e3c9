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


def model_document(card: ModelCard, *, created: int, parent: str | None = None) -> dict[str, Any]:
    """Return the entry of /v1/models for a model or an adapter.

    Args:
        card: description of the model, or of the adapter.
        created: when this server began to serve the model, in seconds since the epoch.
        parent: name of the model to which the adapter belongs; None for a model.
    """
    return {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": "specdec",
        "root": card.name,
        "parent": parent,
        "max_model_len": card.max_length,
        "model_id": card.model_id,
        "has_chat_template": card.chat_template is not None,
    }
