"""Base class of request bodies, and types of their fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from specdec.inference.gateway.bodies import noops
from specdec.inference.gateway.bodies.noops import NoOps, without_no_ops
from specdec.inference.text.chat import note_ignored
from specdec.inference.text.unicode import first_lone_surrogate


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an int, since JSON clients may write 5 as 5.0; return others unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unicode(text: str) -> str:
    """Return the text; raise ValueError if it has half of a surrogate pair, which JSON can write but UTF-8 cannot."""
    if (place := first_lone_surrogate(text)) is not None:
        raise ValueError(f"character {place} is half of a surrogate pair")
    return text


def _all_whole(values: Any) -> Any:
    """Return a list with each float that has no fraction as an int, since JSON clients may write 5 as 5.0.

    A list of more than `MAX_FIELDS` items, or a value that is no list, is returned unchanged.
    """
    return list(map(_whole, values)) if isinstance(values, list) and len(values) <= MAX_FIELDS else values


def check_size(values: Any, limit: int) -> Any:
    """Return the value; refuse an object of too many fields with one error, where Pydantic would make one per field.

    Raises:
        PydanticCustomError: the value is an object of more than `limit` fields; the message names both numbers.
    """
    if isinstance(values, dict) and len(values) > limit:
        message = f"an object of {len(values)} fields exceeds the limit of {limit}"
        raise PydanticCustomError("too_long", "{message}", {"message": message})
    return values


WHOLE = BeforeValidator(_whole)
ALL_WHOLE = BeforeValidator(_all_whole)
MAX_FIELDS = 1024
"""Most fields of an object, and most items of a list in which integers may be written as 5.0."""
Text: TypeAlias = Annotated[str, AfterValidator(_unicode)]


def complete(schema: dict[str, Any], body: type[Body]) -> None:
    """Change a body's JSON schema so that optional fields may be null, and add the fields accepted without effect."""
    for name, field in schema["properties"].items():
        kinds = field.get("anyOf", [field])
        if name not in schema.get("required", ()) and {"type": "null"} not in kinds:
            schema["properties"][name] = {"anyOf": [*kinds, {"type": "null"}], "title": field.get("title", name)}
    schema["properties"].update(noops.schema_of(body.no_ops))


class Body(BaseModel):
    """Base class of request bodies: types are strict, unknown fields are refused, and nulls count as not given.

    Attributes:
        no_ops: fields that are accepted only with a value that changes nothing, and are then dropped.
    """

    model_config = ConfigDict(extra="forbid", strict=True, regex_engine="python-re", json_schema_extra=complete)
    no_ops: ClassVar[NoOps] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, values: Any) -> Any:
        return without_no_ops(check_size(values, MAX_FIELDS), cls.no_ops) if isinstance(values, dict) else values


class SentBack(Body):
    """Base class of messages, their parts, calls and tools, to which clients add fields of their own.

    Unknown fields are ignored here: they reach no chat template, so they cannot change an answer.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _note_ignored(cls, values: Any) -> Any:
        if isinstance(values, dict):
            note_ignored(cls.__name__, values, cls.model_fields)
        return values
