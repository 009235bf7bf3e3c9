"""Where in a JSON schema a fault is. The library says what is wrong; a client wants to know where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

SEARCH_S = 0.5
"""A big schema with a fault deep inside is not searched to the end."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SHARED = ("$defs", "definitions")  # what references point at


def path_of_fault(schema: Any, message_of: Callable[[Any], str]) -> str:
    """The innermost part that has the fault by itself, as in properties/name/items; empty: it is the whole.

    Args:
        message_of: what is wrong with a schema; empty if nothing is.
    """
    shared = {key: schema[key] for key in _SHARED if isinstance(schema, dict) and key in schema}
    message, deadline, path = message_of(schema), time.monotonic() + SEARCH_S, ""
    while (found := _faulty_part(schema, lambda part: message_of({**shared, **part}) == message, deadline)) is not None:
        step, schema = found
        path = f"{path}/{step}" if path else step
    return path


def _faulty_part(schema: Any, is_faulty: Callable[[Any], bool], deadline: float) -> tuple[str, Any] | None:
    parts = ((step, part) for step, part in _parts(schema) if time.monotonic() < deadline)
    return next(((step, part) for step, part in parts if is_faulty(part)), None)


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas directly inside a schema, and how to get there."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in _BY_NAME and isinstance(value, dict):
            entries = [(f"{key}/{name}", part) for name, part in value.items()]
        elif isinstance(value, list):
            entries = [(f"{key}/{i}", part) for i, part in enumerate(value)]
        else:
            entries = [(key, value)]
        yield from ((step, part) for step, part in entries if isinstance(part, dict))
