"""Errors as HTTP answers: a status, and a body in the form of OpenAI's or Anthropic's API."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from specdec.inference import errors
from specdec.inference.declared import did_you_mean
from specdec.inference.errors import cut
from specdec.inference.gateway.answers.documents import JsonAnswer
from specdec.inference.gateway.bodies.noops import UNSUPPORTED
from specdec.inference.workers.calls.status import for_client

if TYPE_CHECKING:
    from fastapi.exceptions import RequestValidationError

logger = logging.getLogger(__name__)

DIALLED_AGAIN_S = 5.0
"""Longest time in seconds until this process dials a lost upstream server again; see grpc_comm/options.py."""
INVALID_REQUEST = "invalid_request_error"
MESSAGES = "/v1/messages"
"""Path of Anthropic's Messages API; its other paths begin with it. Errors at all of them have Anthropic's form."""
MAX_ECHO_CHARACTERS = 200
"""Most characters of a request's value that an error message repeats."""
MAX_MESSAGE_CHARACTERS = 1000
"""Most characters of an error message in an answer; a longer message is cut."""
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "prompt_logprobs": "logprobs",
}
_RENAMED_AT = {
    "/v1/chat/completions": {"prompt": "messages"},
    "/v1/responses": {
        **dict.fromkeys(("prompt", "messages"), "input"),
        "max_new_tokens": "max_output_tokens",
        "response_format": "text",
    },
}
# A complaint about one shape would mislead where a field may have several.
_SHAPES = {
    "prompt": "a text, token ids, or a list of either is expected; no list may be empty, or longer than its limit",
    "stop": "a text or a list of texts is expected, none of them empty or too long",
}
_KINDS = dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "an object is expected")
# Faults of a body that is no object: another kind of JSON, another content type, or nothing.
_NO_OBJECT = ("model_attributes_type", "missing")
_OURS = ("value_error", UNSUPPORTED)  # our own validators, which are more specific than Pydantic's rules
_CODES = {"missing": "missing_required_parameter", UNSUPPORTED: "unsupported_parameter"}
_FAULT = ("server_error", "internal_error")  # with a code, since LLMPerf counts errors by it
_STATUSES: dict[type[errors.SpecDecError], tuple[int, str, str | None]] = {
    errors.InvalidRequestError: (400, INVALID_REQUEST, None),
    errors.ContextLengthError: (400, INVALID_REQUEST, "context_length_exceeded"),
    errors.NotFoundError: (404, INVALID_REQUEST, None),
    errors.UnauthenticatedError: (401, INVALID_REQUEST, "invalid_api_key"),
    errors.ForbiddenError: (403, INVALID_REQUEST, "insufficient_permissions"),
    errors.CapacityError: (429, "rate_limit_error", "queue_full"),
    errors.OtherServerError: (503, "service_unavailable_error", "unavailable"),
    errors.HandshakeError: (503, "service_unavailable_error", "unavailable"),
    errors.UnavailableError: (503, "service_unavailable_error", "unavailable"),
    errors.IncompatibleDraftError: (503, "service_unavailable_error", "incompatible_target"),
    errors.DeadlineError: (504, "timeout_error", "deadline_exceeded"),
}
_ANTHROPICS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_ANTHROPICS |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
"""Types of errors in Anthropic's API, by HTTP status; a status that is not listed has `INVALID_REQUEST`."""
_DETAILS = {"thread": {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}}
"""Further fields of errors in Anthropic's API, by the request's field at fault. Anthropic's client reads them: told
that the server keeps no threads, it sends the whole conversation instead."""


@dataclass(eq=False)  # not frozen: handlers of exceptions set the traceback
class ApiError(Exception):
    """Error that ends an HTTP request, with what its answer says.

    Attributes:
        status: HTTP status code.
        message: text for the client, which names the wrong value and the limit.
        kind: "type" of the error in OpenAI's API.
        param: field of the request that is at fault; None if no single field is.
        code: machine-readable name of the error in OpenAI's API.
        retry_after_s: seconds after which a retry has a fair chance; None if that is unknown.
    """

    status: int
    message: str
    kind: str = INVALID_REQUEST
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the body of the answer: in Anthropic's form if the request's `path` is of its API, else OpenAI's."""
        message, param = cut(self.message, MAX_MESSAGE_CHARACTERS), cut(self.param or "", MAX_ECHO_CHARACTERS)
        if path.startswith(MESSAGES):
            kind = _ANTHROPICS.get(self.status, INVALID_REQUEST)
            return {"type": "error", "error": {"type": kind, "message": message, **_DETAILS.get(param, {})}}
        return {"error": {"message": message, "type": self.kind, "param": param or None, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the error's headers: WWW-Authenticate for status 401, else Retry-After in whole seconds if known."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}

    def answer(self, path: str, **headers: str) -> JsonAnswer:
        """Return the HTTP response to a request for `path`, with `headers` beside those of the error itself."""
        return JsonAnswer(self.body(path), status_code=self.status, headers={**self.headers(), **headers})


def from_error(error: errors.SpecDecError, path: str = "") -> ApiError:
    """Return the HTTP error for an exception of this project.

    The exception may name a field of this project's requests; the error names it as clients of the endpoint `path` do.
    """
    error = for_client(error)
    status, kind, code = _STATUSES.get(type(error), (500, *_FAULT))
    param = _param(error.field, path) if isinstance(error, errors.InvalidRequestError) else None
    return ApiError(status, _message(error), kind, param, code, _retry_after_s(error))


def _retry_after_s(error: errors.SpecDecError) -> float | None:
    """Return the seconds after which a retry may succeed; None if it cannot, or if the time is unknown."""
    if isinstance(error, errors.CapacityError):
        return error.retry_after_s
    is_gone = type(error) is errors.UnavailableError and error.address is not None
    return DIALLED_AGAIN_S if is_gone else None


def _message(error: errors.SpecDecError) -> str:
    """Return the error's message for the client; if it names an upstream server's address, log it and hide it."""
    if isinstance(error, errors.UnavailableError) and error.address is not None:  # gRPC's message has it again
        logger.info("unavailable: %s", error)
        return "the upstream server cannot be reached"
    return error.message


def unexpected() -> ApiError:
    """Return the error for an unforeseen failure; the cause is only in the log."""
    return ApiError(500, "unexpected failure; the server's log has the cause", _FAULT[0], code=_FAULT[1])


def _param(field: str | None, path: str) -> str | None:
    """Return the name by which clients of the endpoint `path` know this project's `field`; None if that is None."""
    return {**_RENAMED, **_RENAMED_AT.get(path, {})}.get(field or "", field)


def unreadable(error: UnicodeDecodeError) -> ApiError:
    """Return the error for a body that is not UTF-8, as some shells send one."""
    place = f"byte {error.start} is 0x{error.object[error.start]:02x}"
    message = f"the body is not UTF-8: {place}; send it in UTF-8, or write other characters as \\uXXXX"
    return ApiError(400, message, code="invalid_json")


def from_validation(error: RequestValidationError, body: type[BaseModel]) -> ApiError:
    """Return the error for a request body that does not fit the schema `body`; of several faults it names one."""
    fault = _worst(error.errors())
    loc = fault["loc"][1:] if fault["loc"][:1] == ("body",) else fault["loc"]
    place = [cut(str(part), MAX_ECHO_CHARACTERS) for part in _fields_of(loc, error.body)]
    if fault["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {fault['ctx']['error']}", code="invalid_json")
    if not place and fault["type"] in _NO_OBJECT:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json", code="no_json")
    param = place[0] if place else _named_first(fault)
    if fault["type"] == "extra_forbidden" and place:
        name = cut(".".join(place), MAX_ECHO_CHARACTERS)
        meant = did_you_mean(place[-1], _names_beside(body, place))
        return ApiError(400, f"{name} is not supported here{meant}", param=param, code="unsupported_parameter")
    message = _SHAPES.get(str(param)) if len(loc) > 1 and fault["type"] not in _OURS else None
    found = _KINDS.get(fault["type"]) or fault["msg"].removeprefix("Value error, ")
    message = message or found + _given(fault)
    code = _CODES.get(fault["type"], "invalid_value")
    return ApiError(400, f"{_path(place)}: {message}" if place else message, param=param, code=code)


def _given(fault: dict[str, Any]) -> str:
    """Return ", not VALUE" for the end of a fault's message, since Pydantic's own messages lack the wrong value.

    A fault is an entry of the list that `errors()` of Pydantic's exception returns. Return an empty text if the value
    is an object, a list or null, or if the message needs no value, as for a missing field or a fault that this
    project's validators found.
    """
    value = fault.get("input")
    value = cut(value, MAX_ECHO_CHARACTERS) if isinstance(value, str) else value
    is_theirs = fault["type"] not in (*_OURS, *_CODES)
    return f", not {json.dumps(value)}" if is_theirs and isinstance(value, str | int | float) else ""


def _path(place: Sequence[str]) -> str:
    """Return the path of a field in the body as a text, such as messages.0.content.

    For a path within a field that may have several shapes (`_SHAPES`), return the name of that field alone.
    """
    return place[0] if place[0] in _SHAPES else ".".join(place)


def _fields_of(loc: Sequence[int | str], body: Any) -> list[int | str]:
    """Return the path in the body that Pydantic's path leads to, without names of validators and of unions' members."""
    found: list[int | str] = []
    for number, part in enumerate(loc, 1):
        is_there = part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        if is_there or (number == len(loc) and str(part).isidentifier() and isinstance(body, dict)):
            found.append(part)
            body = body[part] if is_there and (isinstance(body, dict) or int(part) < len(body)) else None
    return found


def _names_beside(body: type[BaseModel], place: Sequence[str]) -> list[str]:
    """Return the names among which to look for the correct spelling of the unknown field at the path's end.

    For a field of the body itself these are the names of the body's fields; for a deeper one, those of all models that
    may stand within the path's first field.
    """
    if len(place) == 1:
        return [*body.model_fields]
    names, kinds = list[str](), [body.model_fields[place[0]].annotation]
    while kinds:
        kind = kinds.pop()
        kinds += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += [field.alias or name for name, field in kind.model_fields.items()]
            kinds += [field.annotation for field in kind.model_fields.values()]
    return [name for name in names if name != place[-1]]  # which is a field of another one of a union


def _named_first(fault: dict[str, Any]) -> str | None:
    """Return the field that a fault found by this project's validators is about: the first word of its message.

    Return None for a fault that Pydantic found. A fault is an entry of the list that `errors()` of Pydantic's exception
    returns.
    """
    return fault["msg"].removeprefix("Value error, ").split()[0] if fault["type"] in _OURS else None


def _worst(faults: Any) -> dict[str, Any]:
    """Return the fault to report, of those that `errors()` of Pydantic's exception lists for a body.

    A field that may have several types has faults for each of them. Of all faults, a missing field ranks highest, then
    what this project's validators found, then the longest path in the body. Return the highest if it is at the same
    field as the first one, else the first.
    """
    rank = {"missing": 2, **dict.fromkeys(_OURS, 1)}
    fault: dict[str, Any] = max(faults, key=lambda each: (rank.get(each["type"], 0), len(each["loc"])))
    first: dict[str, Any] = faults[0]
    return fault if fault["loc"][:2] == first["loc"][:2] else first
