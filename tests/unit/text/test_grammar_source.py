"""Grammars with reasoning and tool calls allow exactly the outputs that the code which reads answers understands."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.inference.gateway.answers.message import MessageReader
from specdec.inference.request import Grammar, GrammarKind, Preamble
from specdec.inference.text import grammar_source
from specdec.inference.text.calls.formats import FORMATS, HERMES, LLAMA3_JSON, CallFormat
from specdec.inference.text.calls.grammar import MAX_CALLS, arguments_of, calls_anywhere, only_calls
from specdec.inference.text.grammar_source import written_out
from specdec.inference.text.schema_fault import fault_of_schema
from tests.support.grammars import COMPILER, TOKENIZER, is_whole, walk
from tests.support.models import EOS_TOKEN_ID

OUTPUTS = {
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "boolean"}}'): "[true,false]",
    Grammar(GrammarKind.REGEX, "[a-c]+</b>"): "ab</b>",
    Grammar(GrammarKind.CHOICE, '["the end", "other"]'): "other",
    Grammar(GrammarKind.GRAMMAR, 'start: "(" start ")" | /[0-9]/'): "((1))",
    Grammar(GrammarKind.GRAMMAR, 'root ::= "(" root ")" | [0-9]'): "((1))",
}
PREAMBLES = {Preamble.REASONING: "<think>", Preamble.REST_OF_REASONING: ""}


def is_kept(grammar: Grammar, text: str) -> bool:
    """Return whether a grammar allows the text as a whole output."""
    proposal = [*TOKENIZER.encode(text, special=False), EOS_TOKEN_ID]
    return COMPILER.compile(grammar).num_allowed((), proposal) == len(proposal)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(list(OUTPUTS.items())),
    st.sampled_from(list(PREAMBLES.items())),
    st.text(alphabet="ab<>/think{}[]\n\u00e9", max_size=20).filter(lambda text: "</think>" not in text),
    st.sampled_from(["", "\n\n"]),
)
def test_a_grammar_begins_after_the_reasoning(
    output: tuple[Grammar, str], preamble: tuple[Preamble, str], thought: str, space: str
) -> None:
    plain, text = output
    grammar = Grammar(plain.kind, plain.text, preamble[0])
    whole = f"{preamble[1]}{thought}</think>{space}{text}"
    assert is_kept(grammar, whole)
    assert not is_kept(grammar, whole + "x")
    assert not is_kept(grammar, whole[:-1])
    assert not is_kept(grammar, f"{preamble[1]}{thought}")
    assert is_kept(grammar, text) is (preamble[0] is Preamble.REASONING), "who need not think may begin at once"


@pytest.mark.parametrize("preamble", PREAMBLES)
def test_a_peer_that_knows_no_preambles_masks_alike(preamble: Preamble) -> None:
    rng = random.Random(1)
    for plain in OUTPUTS:
        grammar = Grammar(plain.kind, plain.text, preamble)
        other = written_out(grammar)
        assert other.preamble is Preamble.NONE
        output = walk(COMPILER.compile(grammar), rng, limit=12)
        for end in range(len(output)):
            ours, theirs = (COMPILER.compile(each).masks(output[:end], ()) for each in (grammar, other))
            assert ours == theirs
        assert written_out(plain) == plain


SCHEMAS: dict[str, dict[str, Any] | None] = {
    "person": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"enum": [1, 20]}},
        "required": ["age"],
        "additionalProperties": False,
    },
    "ref": {
        "properties": {
            "a": {"$ref": "#/$defs/bit"},
            "b": {"type": "array", "items": {"$ref": "#/$defs/bit"}, "maxItems": 2},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"bit": {"type": "boolean"}},
    },
    "nothing": None,
}


def calls_of(form: CallFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return (content of a text, its tool calls as (name, arguments))."""
    reading = MessageReader(None, form.reader(frozenset(SCHEMAS)), one_call=False).push(text, is_last=True)
    return reading.content, [(str(call.name), json.loads(call.arguments)) for call in reading.calls.values()]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("many", [False, True])
def test_allowed_calls_are_read_as_valid(form: CallFormat, many: bool) -> None:
    """Every output that a grammar for tool calls allows is read as valid calls.

    Outputs are random walks through the allowed tokens, like those of a model that never learned to call tools.
    """
    rng, named = random.Random(2), set()
    matcher = COMPILER.compile(only_calls(form, SCHEMAS, many=many, output=None))
    for _ in range(10):
        output = walk(matcher, rng, limit=150)
        if is_whole(output):
            content, calls = calls_of(form, TOKENIZER.decode(output))
            assert content == ""
            assert 1 <= len(calls) <= (MAX_CALLS if many and form.between else 1)
            for name, arguments in calls:
                jsonschema.validate(arguments, arguments_of(SCHEMAS[name]))
                named.add(name)
    assert len(named) >= 2


ANSWERS = {
    '{"x":null}': {"properties": {"x": {"type": "null"}}, "additionalProperties": False},
    '{"name":"person","age":1}': {"properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
}


@pytest.mark.parametrize(("answer", "schema"), ANSWERS.items())
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_call_or_an_answer(form: CallFormat, answer: str, schema: dict[str, Any]) -> None:
    """A grammar for tools and a JSON schema allows either a tool call or JSON of that schema.

    Regression: after the first brace, with which Llama's calls begin too, the grammar allowed calls alone.
    """
    output = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", **schema}))
    grammar = only_calls(form, SCHEMAS, many=True, output=output)
    call = form.written({"function": {"name": "nothing", "arguments": {}}})
    assert [is_kept(grammar, text) for text in (answer, call, "x", f"{call}x")] == [True, True, False, False]


def test_strict_arguments_wherever_a_call_begins() -> None:
    grammar = calls_anywhere(HERMES, SCHEMAS)
    good, bad = (HERMES.written({"function": {"name": "person", "arguments": {"age": age}}}) for age in (20, 21))
    kept = ["", "any text { <tool", good, f"so:\n{good}\n{good} done"]
    assert [is_kept(grammar, text) for text in kept] == [True] * len(kept)
    assert not any(
        is_kept(grammar, text) for text in (bad, f"so {bad}", "<tool_call>", good.replace("person", "other"))
    )
    assert LLAMA3_JSON.trigger is None


def test_schema_faults_are_found_without_a_tokenizer() -> None:
    assert fault_of_schema(SCHEMAS["person"]) == ("", "")
    path, fault = fault_of_schema({"type": "object", "properties": {"a": {"items": {"type": "nonsense"}}}})
    assert (path, "nonsense" in fault) == ("properties/a/items", True)


def test_compiled_grammars_are_sent_on_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that a server has compiled is sent to other servers in its final syntax, and not converted again.

    Regression: drafts and targets converted GBNF to Lark again on their event loops; a grammar of 37 kB stopped these
    for 0.7 s.
    """
    grammar = Grammar(GrammarKind.GRAMMAR, 'root ::= "the" [0-9]', Preamble.REASONING)
    COMPILER.compile(grammar)
    monkeypatch.setattr(grammar_source, "_plain_source", None)
    assert "the" in written_out(grammar).text
