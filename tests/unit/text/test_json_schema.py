"""What replaces JSON schema keywords that the library llguidance lacks allows no value that the schema forbids."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import Grammar, GrammarKind
from specdec.inference.text.json_schema import adapted, closed
from tests.support.grammars import COMPILER, TOKENIZER, compiled, is_whole, walk

TEXT, NUMBER = {"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 0, "maximum": 9}


def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


A_OR_B = [an_object("a", a=TEXT, b=TEXT), an_object("b", a=TEXT, b=TEXT)]
KINDS = [an_object("kind", kind={"const": kind}, value=value) for kind, value in (("t", TEXT), ("n", NUMBER))]
SERVED = {
    "types": {"oneOf": [TEXT, NUMBER, {"type": "null"}]},
    "values": {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c", 1]}, {"const": True}]},
    "kinds": {"oneOf": KINDS},
    "kinds by reference": {
        "oneOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/n"}],
        "$defs": {"t": KINDS[0], "n": KINDS[1]},
    },
    "what others do not know": {
        "oneOf": [{**an_object("a", a=TEXT), "additionalProperties": False}, an_object("b", b=TEXT, a=NUMBER)]
    },
    "what others require": {"oneOf": A_OR_B},
    "what others require, by reference": {
        "oneOf": [{"$ref": "#/definitions/a"}, {"$ref": "#/definitions/b"}],
        "definitions": dict(zip("ab", A_OR_B, strict=True)),
    },
    "required alone": {
        **an_object(a=TEXT, b=NUMBER),
        "additionalProperties": False,
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "not required": {**an_object("a", a=TEXT, b=TEXT), "not": {"required": ["a", "b"]}},
    "dependencies": {**an_object("a", a=TEXT, b=TEXT, c=NUMBER), "dependencies": {"b": ["c"]}},
    "dependent required": {
        **an_object(a=TEXT, b=TEXT, c=NUMBER),
        "additionalProperties": False,
        "dependentRequired": {"a": ["b", "c"], "c": ["a"]},
    },
    "listed names": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER},
    "one name": {**an_object("b", a=TEXT, b=TEXT), "propertyNames": {"const": "b"}},
    "names by reference": {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/n"},
        "additionalProperties": TEXT,
        "$defs": {"n": {"type": "string", "enum": ["a", "c"], "title": "N"}},
    },
    "a format": {**TEXT, "format": "color"},
    "items": {"type": "array", "items": NUMBER, "maxItems": 3, "uniqueItems": False},
}


@pytest.mark.parametrize("schema", SERVED.values(), ids=SERVED)
def test_outputs_match_the_given_schema(schema: dict[str, Any]) -> None:
    rng, num_whole = random.Random(3), 0
    for _ in range(15):
        output = walk(compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema)), rng, limit=400)
        if is_whole(output):
            num_whole += 1
            jsonschema.validate(json.loads(TOKENIZER.decode(output)), schema)
    assert num_whole


def test_each_alternative_can_come_out() -> None:
    for schema, answers in (
        (SERVED["kinds"], ('{"kind":"t","value":"a"}', '{"kind":"n","value":1}')),
        (SERVED["what others require"], ('{"a":"x"}', '{"b":"x"}')),
    ):
        matcher = compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        for answer in answers:
            assert matcher.goes_on(TOKENIZER.encode(answer)), answer
        assert not matcher.goes_on(TOKENIZER.encode('{"a":"x","b":"y"}'))


REFUSED = {
    "one within the other": ({"oneOf": [an_object("a", a=TEXT), an_object("a", "b", a=TEXT, b=TEXT)]}, "oneOf"),
    "patterns": ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}]}, "oneOf"),
    "numbers": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    "not": ({"not": {"type": "string"}}, "not"),
    "uniqueItems": ({"type": "array", "items": NUMBER, "uniqueItems": True}, "uniqueItems"),
}


@pytest.mark.parametrize(("schema", "word"), REFUSED.values(), ids=REFUSED)
def test_words_that_would_be_ignored_are_refused_unless_lenient(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert compiled(GrammarKind.JSON_SCHEMA, json.dumps({**schema, "x-guidance": {"lenient": True}})).goes_on(())


leaves = st.sampled_from([TEXT, NUMBER, {"const": "a"}, {"const": 1.0}, {"enum": ["a", None]}, {"type": "number"}, {}])
objects = st.builds(
    lambda properties, names, is_open: {
        **an_object(*names, **properties),
        **({} if is_open else {"additionalProperties": False}),
    },
    st.dictionaries(st.sampled_from("abc"), leaves, max_size=2),
    st.lists(st.sampled_from("abc"), max_size=2, unique=True),
    st.booleans(),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(leaves | objects, min_size=2, max_size=3), st.integers(0, 2**32))
def test_no_value_matches_two_alternatives(alternatives: list[dict[str, Any]], seed: int) -> None:
    schema = {"oneOf": alternatives}
    assume("anyOf" in adapted(schema))
    try:
        matcher = COMPILER.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    except InvalidRequestError:
        return  # nothing can match
    output = walk(matcher, random.Random(seed), limit=200)
    if is_whole(output):
        jsonschema.validate(json.loads(TOKENIZER.decode(output)), schema)


def test_many_alternatives_are_not_compared_for_ever() -> None:
    many = {"oneOf": [an_object("a", a={"enum": [*range(i, 3000 + i)]}) for i in range(300)]}
    assert adapted(many) == many
    circle = {"$defs": {"a": an_object("a", a={"$ref": "#/$defs/a"})}, "oneOf": [{"$ref": "#/$defs/a"}] * 2}
    assert adapted(circle) == circle
    assert adapted({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}, "oneOf": [{}, {}]})["oneOf"]


@pytest.mark.parametrize(
    "schema",
    [5, True, {"type": 5}, {"oneOf": [[], 5]}, {"oneOf": 5}, {"format": [1]}, {"not": 5}, {"not": {"required": 5}},
     {"oneOf": [{"required": [5]}, {"properties": 5, "required": ["a"]}]}, {"enum": 5, "oneOf": [{"enum": 5}, {}]},
     {"oneOf": [{"$ref": "#/5"}, {"$ref": "#/"}]}, {"properties": []}, {"type": [[]], "oneOf": [{}, {}]},
     {"dependencies": 5}, {"dependencies": {"a": [5]}}, {"dependentRequired": {"a": 5}, "allOf": 5},
     {"dependencies": {"a": ["b"]}, "allOf": 5}],
    ids=str,
)  # fmt: skip
def test_rewriting_any_json_raises_nothing(schema: Any) -> None:
    adapted(schema)


def test_a_strict_schema_leaves_no_object_open() -> None:
    """A schema that is made strict allows only the keys that it names, in every object.

    Regression: in an open object the same key could come twice, which strict parsers refuse.
    """
    schema = {**an_object(a={"anyOf": [an_object(x=TEXT), {"type": "null"}]}), "$defs": {"b": an_object()}}
    kept = closed(schema)
    parts = (kept, kept["properties"]["a"]["anyOf"][0], kept["$defs"]["b"])
    assert [part["additionalProperties"] for part in parts] == [False] * 3
    matcher = compiled(GrammarKind.JSON_SCHEMA, json.dumps(kept))
    assert not matcher.goes_on(TOKENIZER.encode('{"k'))


OPEN = {
    "additionalProperties": {"type": "object", "additionalProperties": True},
    "properties/a": an_object(a={}),
    "properties/b": an_object(b={"type": "array"}),
    "patternProperties": {"type": "object", "patternProperties": {"^x": TEXT}},
    "items": {"type": "array", "items": {"description": "anything"}},
}


@pytest.mark.parametrize(("place", "schema"), OPEN.items(), ids=OPEN)
def test_a_strict_schema_that_asks_for_openness_is_refused(place: str, schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=place):
        closed(schema)
