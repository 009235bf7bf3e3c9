"""Tools for the tests of chats and of the Responses API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}


class Forecast(BaseModel):
    """Weather forecast for some days."""

    days: int = Field(ge=1, le=9)
    rain: bool


def tool(name: str = "f", parameters: dict[str, Any] | None = PARAMETERS, **others: Any) -> dict[str, Any]:
    """Return a function as a chat has it."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **others}}


def response_tool(name: str = "f", parameters: dict[str, Any] | None = PARAMETERS, **others: Any) -> dict[str, Any]:
    """Return a function as the Responses API has it."""
    return {"type": "function", **tool(name, parameters, **others)["function"]}
