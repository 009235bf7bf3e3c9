"""Search for the part of a JSON schema that is wrong, which the messages of the library llguidance do not name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from specdec.inference.errors import CapacityError, InternalError
from specdec.inference.text.grammar_source import brief, parser_limits, source_of_schema
from specdec.inference.text.grammar_trial import try_out
from specdec.inference.text.json_schema import BY_NAME

SEARCH_S = 0.5
"""Most CPU seconds of a search for a schema's fault; a fault deep inside a big schema may not be found in this time."""
_SHARED = ("$defs", "definitions")  # what references point at


def fault_of_schema(schema: Any) -> tuple[str, str]:
    """Return the path to a JSON schema's fault, such as properties/name/items, and llguidance's message about it.

    The path leads to the innermost part that has the fault by itself; it is empty for the schema as a whole. Both texts
    are empty if the schema has no fault, or if it cannot be tried out now.
    """
    try:
        message = _message_of(schema)
        return (_path(schema, message), message) if message else ("", "")
    except (InternalError, CapacityError):  # this server's fault, not the schema's
        return "", ""
    except (ValueError, RecursionError) as exc:
        return "", brief(str(exc))


def _message_of(schema: Any) -> str:
    from llguidance import LLMatcher

    source = source_of_schema(schema)
    try_out(source, is_awaited=lambda: True)  # the place of a fault is worth no one's wait
    return brief(LLMatcher.validate_grammar(source, limits=parser_limits()))


def _path(schema: Any, message: str) -> str:
    shared = {key: schema[key] for key in _SHARED if isinstance(schema, dict) and key in schema}
    deadline, steps = time.thread_time() + SEARCH_S, list[str]()
    while (found := _faulty_part(schema, shared, message, deadline)) is not None:
        step, schema = found
        steps.append(step)
    return "/".join(steps)


def _faulty_part(schema: Any, shared: dict[str, Any], message: str, deadline: float) -> tuple[str, Any] | None:
    parts = ((step, part) for step, part in _parts(schema) if time.thread_time() < deadline)
    return next(((step, part) for step, part in parts if _message_of({**shared, **part}) == message), None)


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path, such as properties/name, and the schema of each part that is directly inside a schema."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in BY_NAME and isinstance(value, dict):
            entries = [(f"{key}/{name}", part) for name, part in value.items()]
        elif isinstance(value, list):
            entries = [(f"{key}/{i}", part) for i, part in enumerate(value)]
        else:
            entries = [(key, value)]
        yield from ((step, part) for step, part in entries if isinstance(part, dict))
