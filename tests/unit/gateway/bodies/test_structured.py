"""Each request field for structured output (a JSON schema, regex, choice or grammar) leads to the same grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.inference.gateway.bodies.schema import ChatBody, CompletionBody
from specdec.inference.request import ANY_JSON_OBJECT, Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"const": None}}, "additionalProperties": False}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
NAMED = {"name": "answer", "strict": True, "schema": SCHEMA}
WAYS: dict[str, tuple[dict[str, Any], Grammar | None]] = {
    "nothing": ({}, None),
    "text": ({"response_format": {"type": "text"}}, None),
    "null": ({"response_format": None, "guided_json": None}, None),
    "object": ({"response_format": {"type": "json_object"}}, ANY_JSON_OBJECT),
    "schema": ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, JSON),
    "guided_json": ({"guided_json": SCHEMA}, JSON),
    "guided_json text": ({"guided_json": json.dumps(SCHEMA)}, JSON),
    "guided_json empty": ({"guided_json": {}}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
    "guided_regex": ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
    "guided_choice": ({"guided_choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.GRAMMAR, 'start: "a"')),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, JSON),
    "structured regex": ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar(GrammarKind.REGEX, "a+")),
    "structured object": ({"structured_outputs": {"json_object": True}}, ANY_JSON_OBJECT),
    "text beside one": ({"response_format": {"type": "text"}, "guided_json": SCHEMA}, JSON),
}


@pytest.mark.parametrize(("fields", "grammar"), WAYS.values(), ids=WAYS)
def test_fields_mean_a_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    body = CompletionBody.model_validate({"prompt": "x", "n": 2, **fields})
    assert body.grammar_of_output() == grammar
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
    assert chat.grammar_of_output() == grammar
