"""What all bodies have in common, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from inference.gateway import noops
from inference.gateway.noops import NoOps, without_no_ops
from inference.text.unicode import first_lone_surrogate


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unicode(text: str) -> str:
    """JSON can write down half of a surrogate pair, which is no character."""
    if (place := first_lone_surrogate(text)) is not None:
        raise ValueError(f"character {place} is half of a surrogate pair")
    return text


def _all_whole(values: Any) -> Any:
    """As `_whole`, for a list that is not too long for it: long ones are validated in compiled code alone."""
    return list(map(_whole, values)) if isinstance(values, list) and len(values) <= MAX_FIELDS else values


def check_size(values: Any, limit: int) -> Any:
    """Refuse an object of too many fields at once; Pydantic would make one error of each.

    Raises:
        PydanticCustomError: naming both numbers.
    """
    if isinstance(values, dict) and len(values) > limit:
        message = f"an object of {len(values)} fields exceeds the limit of {limit}"
        raise PydanticCustomError("too_long", "{message}", {"message": message})
    return values


WHOLE = BeforeValidator(_whole)
ALL_WHOLE = BeforeValidator(_all_whole)
MAX_FIELDS = 1024
"""Of an object, and of a list that may write integers as 5.0."""
Text: TypeAlias = Annotated[str, AfterValidator(_unicode)]


def complete(schema: dict[str, Any], body: type[Body]) -> None:
    """Say in the schema that a null stands for nothing, and which other values do."""
    for name, field in schema["properties"].items():
        kinds = field.get("anyOf", [field])
        if name not in schema.get("required", ()) and {"type": "null"} not in kinds:
            schema["properties"][name] = {"anyOf": [*kinds, {"type": "null"}], "title": field.get("title", name)}
    schema["properties"].update(noops.schema_of(body.no_ops))


class Body(BaseModel):
    """Strict: a number is no string. Unknown fields are refused; a null says nothing, nor does what is so anyway."""

    model_config = ConfigDict(extra="forbid", strict=True, regex_engine="python-re", json_schema_extra=complete)
    no_ops: ClassVar[NoOps] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, values: Any) -> Any:
        return without_no_ops(check_size(values, MAX_FIELDS), cls.no_ops) if isinstance(values, dict) else values
