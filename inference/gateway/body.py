"""What all bodies have in common, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

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


WHOLE = BeforeValidator(_whole)
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
        return without_no_ops(values, cls.no_ops) if isinstance(values, dict) else values
