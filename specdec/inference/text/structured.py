"""Structured output: grammars for OpenAI's `response_format`, and vLLM's `guided_*` and `structured_outputs`.

A JSON schema may be given as an object, or as its text where vLLM takes that. Every output fits its schema, unless the
limit of tokens cuts it; `strict` also forbids properties that the schema does not name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import ANY_JSON_OBJECT, Grammar, GrammarKind
from specdec.inference.text.json_schema import closed
from specdec.inference.text.unicode import check_unicode

KINDS = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.GRAMMAR,
}
GUIDED = tuple(f"guided_{name}" for name in KINDS)
NAMES = ("response_format", "structured_outputs", *GUIDED)
"""Names of the fields of a request's body that ask for structured output; a body may set only one of them."""


def only_grammar(given: Mapping[str, Any]) -> tuple[str | None, Grammar | None]:
    """Return the name of the field by which a request's body asks for structured output, and the grammar for it.

    Return (None, None) if the body lets the output be any text.

    Args:
        given: fields of the body by name, as JSON values; only those in `NAMES` are read.

    Raises:
        ValueError: the body has several of these fields.
        InvalidRequestError: the grammar is empty, too long or not valid UTF-8, or its schema cannot be strict.
    """
    found = {name: grammar for name in NAMES if (grammar := _checked(name, given.get(name))) is not None}
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} exclude each other")
    return next(iter(found.items()), (None, None))


def _checked(name: str, value: Any) -> Grammar | None:
    try:
        return _grammar_of(name, value)
    except InvalidRequestError as exc:
        raise InvalidRequestError(f"{name}: {exc.message}", field=name) from exc


def _grammar_of(name: str, value: Any) -> Grammar | None:
    if value is None:
        return None
    if name == "response_format":
        return _of_format(value)
    if name == "structured_outputs":
        ((name, value),) = ((key, each) for key, each in value.items() if each is not None)
        return ANY_JSON_OBJECT if name == "json_object" else _grammar_of(f"guided_{name}", value)
    text = value if isinstance(value, str) else json.dumps(value)
    check_unicode(text, name)
    return Grammar(KINDS[name.removeprefix("guided_")], text)


def _of_format(value: Mapping[str, Any]) -> Grammar | None:
    if value["type"] == "json_object":
        return ANY_JSON_OBJECT
    if value["type"] == "json_schema":
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_kept(value["json_schema"])))
    return None


def _kept(format_: Mapping[str, Any]) -> Any:
    """Return the schema in the `json_schema` of a response format.

    If `strict` is set there, its objects are limited to the properties that the schema names.
    """
    try:
        return closed(format_["schema"]) if format_.get("strict") else format_["schema"]
    except ValueError as exc:
        raise InvalidRequestError(str(exc), field="response_format") from exc
