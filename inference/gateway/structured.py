"""What the fields of structured output mean: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inference.request import ANY_JSON_OBJECT, Grammar, GrammarKind

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_KINDS = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.GRAMMAR,
}


def the_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """The one grammar among fields by their names; None if there is none.

    Args:
        given: values of `GUIDED`, of `json`, `regex`, `choice`, `grammar` and `json_object`, or None.

    Raises:
        ValueError: there are several.
        InvalidRequestError: it is empty or too long.
    """
    present = {name: value for name, value in given.items() if value not in (None, False)}
    if len(present) > 1:
        raise ValueError(f"{' and '.join(present)} exclude each other")
    for name, value in present.items():
        if name == "json_object":
            return ANY_JSON_OBJECT
        return Grammar(_KINDS[name.removeprefix("guided_")], _text(value))
    return None


def _text(value: str | bool | Mapping[str, Any] | Sequence[str]) -> str:
    """Texts are taken as they are; what is JSON in the body is JSON text for the server behind."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
