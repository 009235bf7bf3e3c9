"""Grammars that let a model call only the offered functions, with valid arguments, in its own format of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from specdec.inference.request import Grammar, GrammarKind
from specdec.inference.text.calls.formats import MARKERS, CallFormat
from specdec.inference.text.grammar_source import Markers, nested
from specdec.inference.text.json_schema import adapted

MAX_CALLS = 16
"""Most tool calls in an answer under the grammar of `only_calls`; that of `calls_anywhere` has no such limit."""
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON
_MARKS = Markers(MARKERS)
_text = _MARKS.literal

Functions: TypeAlias = Mapping[str, Mapping[str, Any] | None]
"""JSON schema of the arguments of each function, by the function's name; None if it takes no arguments."""


def arguments_of(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments for a grammar; if `schema` is None, it allows only {}."""
    if schema is None:
        return {"type": "object", "additionalProperties": False}
    return {"type": "object", "x-guidance": _SPACED, **schema}


def only_calls(form: CallFormat, functions: Functions, *, many: bool, output: Grammar | None) -> Grammar:
    """Return the grammar of an answer that is one tool call, or if `many` also several.

    The answer may instead be a text of the grammar `output`; if that is None, calls are required.
    """
    more = f"({_text(form.between)} call){{0,{MAX_CALLS - 1}}}" if many and form.between is not None else ""
    opening = f"{_text(form.opening)}?" if form.opening else ""
    start = f"start: {'calls | @output' if output else 'calls'}\ncalls: {opening} call {more}\n"
    call = f"call: {_text(form.before)} object {_text(form.after)}\n"
    lark = _MARKS.complete(start + call + _objects(form, functions))
    return nested(lark, output, "output") if output else Grammar(GrammarKind.GRAMMAR, lark)


def calls_anywhere(form: CallFormat, functions: Functions) -> Grammar:
    """Return the grammar of an answer of any text, in which tool calls may stand anywhere, but only of `functions`.

    Args:
        form: format of the calls, which must have a trigger: a text with which each call begins.
    """
    trigger = form.trigger or ""
    rest = _text(form.before.removeprefix(trigger))
    start = f"start: called* TEXT\ncalled: begin {rest} object {_text(form.after)}\n"
    lark = _MARKS.complete(start + _MARKS.anything_before("begin", trigger) + _objects(form, functions))
    return Grammar(GrammarKind.GRAMMAR, lark)


def _objects(form: CallFormat, functions: Functions) -> str:
    """Return the Lark rule `object` for the JSON of a call: a function's name, and the arguments of this function.

    The text before the arguments is cut into pieces as small as those of a JSON schema's own grammar. llguidance takes
    the longest piece that matches: with longer pieces, it could not tell a call from other JSON after the first brace.
    """
    numbers = range(len(functions))
    rules = [f"object: {' | '.join(f'object_{i}' for i in numbers)}"]
    for i, (name, schema) in enumerate(functions.items()):
        head = ("{", '"name"', ": ", f'"{name}"', ", ", f'"{form.key}"', ": ")
        rules.append(f'object_{i}: {" ".join(map(_text, head))} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(adapted(arguments_of(schema)))}")
    return "\n".join(rules) + "\n"
