"""Grammars of outputs with tool calls or reasoning between marks such as <think>, each with a text that it accepts."""

from __future__ import annotations

import json
from dataclasses import replace

from specdec.inference.request import Grammar, GrammarKind, Preamble
from specdec.inference.text.calls.formats import FORMATS
from specdec.inference.text.calls.grammar import calls_anywhere, only_calls
from specdec.inference.text.reasoning import BEGIN, END

ANY = {"type": "object", "additionalProperties": {"type": "integer"}}
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(ANY))


def marked() -> dict[str, tuple[Grammar, str]]:
    """Return grammars of outputs with tool calls or reasoning between marks, each with a text that it accepts.

    The keys are descriptions such as "schema, no thought".
    """
    found = {}
    for name, form in FORMATS.items():
        call = f'{form.before}{{"name": "f", "{form.key}": {{"a": 1}}}}{form.after}'
        required = only_calls(form, {"f": ANY}, many=form.between is not None, output=None)
        found[f"{name}, required"] = required, f"{form.opening or ''}{call}"
        found[f"{name}, after thoughts"] = replace(required, preamble=Preamble.REASONING), f"{BEGIN}a <b>{END}\n{call}"
        rest = replace(only_calls(form, {"f": ANY}, many=False, output=SCHEMA), preamble=Preamble.REST_OF_REASONING)
        found[f"{name}, or JSON"] = rest, f'a\n{END}{{"b":2}}'
        if form.trigger is not None:
            strict = calls_anywhere(form, {"f": ANY})
            found[f"{name}, anywhere"] = strict, f"a <b>{call} and {call} c"
            found[f"{name}, anywhere after thoughts"] = (
                replace(strict, preamble=Preamble.REASONING),
                f"{BEGIN}{END}{call}",
            )
    found["schema"] = replace(SCHEMA, preamble=Preamble.REASONING), f'{BEGIN}\na\n{END}\n\n{{"a":1}}'
    found["schema, no thought"] = replace(SCHEMA, preamble=Preamble.REASONING), '{"a":1}'
    found["schema, rest of a thought"] = replace(SCHEMA, preamble=Preamble.REST_OF_REASONING), f'a{END}{{"a":1}}'
    return found
