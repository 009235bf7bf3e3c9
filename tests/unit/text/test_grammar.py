"""Grammars over tokens: masks of allowed tokens depend only on the output so far, and outputs obey the grammar."""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema

from specdec.inference.config import BUNDLED_TARGET
from specdec.inference.errors import InternalError, InvalidRequestError
from specdec.inference.request import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
from specdec.inference.text import grammar_trial
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.grammar_source import LIMITS
from specdec.inference.text.tokenizer import Tokenizer
from tests.support.grammars import COMPILER, TOKENIZER, allowed_ids, compiled, is_whole, walk
from tests.support.models import DEFAULT_VOCAB_SIZE, EOS_TOKEN_ID, tiny_tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "on", None, True]}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","items":{"type":"boolean"}}'),
    Grammar(GrammarKind.REGEX, r"(the|a)+[0-9]{2,4}(in|ing)*"),
    Grammar(GrammarKind.CHOICE, '["the end", "the ending", "other"]'),
    Grammar(GrammarKind.GRAMMAR, 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]+/'),
)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
def test_a_mask_is_that_of_a_fresh_matcher(grammar: Grammar) -> None:
    """A grammar's matcher gives the mask that a new matcher would, whatever outputs and proposals it saw before."""
    rng = random.Random(7)
    matcher = COMPILER.compile(grammar)
    outputs = [walk(COMPILER.compile(grammar), rng, limit=40) for _ in range(12)]
    prefixes = [output[:end] for output in outputs for end in range(len(output))]
    states = [rng.choice(prefixes) for _ in range(1000)]
    fresh = {tuple(prefix): COMPILER.compile(grammar).masks(prefix, ())[0] for prefix in prefixes}
    for prefix in states:
        if rng.random() < 0.5:
            matcher.forced(prefix, rng.randrange(40))
        if rng.random() < 0.3:
            matcher.num_allowed(prefix, [rng.randrange(DEFAULT_VOCAB_SIZE) for _ in range(3)])
        assert matcher.masks(prefix, ())[0] == fresh[tuple(prefix)]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
def test_forced_tokens_are_those_without_a_choice(grammar: Grammar) -> None:
    rng = random.Random(3)
    matcher, num_forced = COMPILER.compile(grammar), 0
    for _ in range(20):
        output = walk(COMPILER.compile(grammar), rng, limit=40)
        for end in range(len(output)):
            prefix = output[:end]
            for token_id in matcher.forced(prefix, 8):
                assert allowed_ids(COMPILER.compile(grammar).masks(prefix, ())[0]) == [token_id]
                prefix, num_forced = [*prefix, token_id], num_forced + 1
    assert num_forced or grammar.kind is GrammarKind.GRAMMAR


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
def test_allowed_tokens_are_accepted(grammar: Grammar) -> None:
    """A grammar's matcher accepts the tokens of its mask and no others; if the mask has one, it may accept others."""
    rng = random.Random(5)
    output = walk(COMPILER.compile(grammar), rng, limit=12)
    matcher = COMPILER.compile(grammar)
    for end in range(len(output)):
        ids = allowed_ids(matcher.masks(output[:end], ())[0])
        taken = {v for v in range(DEFAULT_VOCAB_SIZE) if matcher.num_allowed(output[:end], [v])}
        assert set(ids) <= taken
        assert set(ids) == taken or len(ids) == 1


def simple_schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -5, "maximum": 300},
            {"type": "number"},
            {"type": "string", "maxLength": 5},
            {"type": "string", "pattern": "^[a-c]{1,3}$"},
            {"enum": ["in", 4, None]},
            {"const": {"k": [1]}},
        ]
    )
    names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)

    def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        arrays = st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(1, 3))
        objects = st.builds(
            lambda keys, values, num_needed: {
                "type": "object",
                "properties": dict(zip(keys, values, strict=False)),
                "required": keys[:num_needed],
                "additionalProperties": False,
            },
            names,
            st.lists(inner, min_size=3, max_size=3),
            st.integers(0, 3),
        )
        unions = st.builds(lambda left, right: {"anyOf": [left, right]}, inner, inner)
        return arrays | objects | unions

    return st.recursive(leaves, nested, max_leaves=6)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=simple_schemas(), seed=st.integers(0, 2**32))
def test_an_output_matches_its_schema(schema: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    output = walk(compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema)), rng, limit=400)
    assert is_whole(output)
    jsonschema.validate(json.loads(TOKENIZER.decode(output)), schema)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), schema=simple_schemas().filter(lambda schema: not re.search("anyOf|object", str(schema))))
def test_instances_of_a_schema_can_be_written(data: st.DataObject, schema: dict[str, Any]) -> None:
    """The text of any valid instance of a JSON schema is allowed by the schema's grammar."""
    text = json.dumps(data.draw(from_schema(schema)), separators=(",", ":"), ensure_ascii=False)
    assume(not re.search(r"[0-9][eE.]", text))  # how a number is written down is left to the grammar
    text = text.replace("\x7f", "\\u007f")  # the one character that may be written down in one way alone
    token_ids = [*TOKENIZER.encode(text), EOS_TOKEN_ID]
    matcher = compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert matcher.num_allowed((), token_ids) == len(token_ids), text


@pytest.mark.parametrize("seed", range(20))
def test_outputs_match_their_regex_choice_or_grammar(seed: int) -> None:
    rng = random.Random(seed)
    outputs = [TOKENIZER.decode(walk(COMPILER.compile(grammar), rng, limit=200)) for grammar in GRAMMARS[2:]]
    assert re.fullmatch(r"(the|a)+[0-9]{2,4}(in|ing)*", outputs[0])
    assert outputs[1] in ("the end", "the ending", "other")
    assert re.fullmatch(r"\(*[0-9]+\)*", outputs[2])
    assert outputs[2].count("(") == outputs[2].count(")")


def test_gbnf_is_a_grammar_too() -> None:
    matcher = compiled(GrammarKind.GRAMMAR, 'root ::= "the" [0-9]+')
    assert TOKENIZER.decode(matcher.forced((), 9)) == "the"


def test_nothing_is_allowed_after_the_end() -> None:
    matcher = compiled(GrammarKind.REGEX, "the")
    forced = matcher.forced((), 9)
    assert forced[-1] == EOS_TOKEN_ID
    assert matcher.forced(forced, 9) == []
    assert not matcher.goes_on(forced)
    assert matcher.masks((), [*forced, 5])[len(forced) :] == [None, None]


def test_a_refused_output_is_a_fault_of_ours() -> None:
    matcher = compiled(GrammarKind.REGEX, "the")
    with pytest.raises(InternalError, match="token 200"):
        matcher.masks([200], ())


MANY_STATES = r"(a|b)*c|a[x-z]{1,60}(foo|bar|[0-9]{3,50}){2,9}"


@pytest.mark.parametrize("limit", [{"max_lexer_states": 25}, {"max_lexer_states": 30}])
def test_a_draft_that_reaches_a_limit_fails_no_request(limit: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft token that reaches a limit of the grammar library does not end its request.

    Regression: the library's limits count all that a matcher has read, so a rejected draft token ended its request.
    """
    monkeypatch.setattr("specdec.inference.text.grammar_source.LIMITS", {**LIMITS, **limit})
    compiler = GrammarCompiler(TOKENIZER, DEFAULT_VOCAB_SIZE)
    output, draft = TOKENIZER.encode("abab"), TOKENIZER.encode("axxx1234567bar")
    alone = compiler.compile(Grammar(GrammarKind.REGEX, MANY_STATES))
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, MANY_STATES))
    masks = matcher.masks((), draft)
    assert 0 < len(masks) <= len(draft)
    assert masks[0] == alone.masks((), ())[0]
    with pytest.raises(InvalidRequestError, match="lexer error"):
        matcher.masks(draft, ())
    for end in range(len(output) + 1):
        assert matcher.masks(output[:end], draft)[0] == alone.masks(output[:end], ())[0]


BAD = {
    "no JSON": (GrammarKind.JSON_SCHEMA, '{"type":', "column 9"),
    "no schema": (GrammarKind.JSON_SCHEMA, "5", "object schema"),
    "type": (GrammarKind.JSON_SCHEMA, '{"properties":{"a":{"items":{"type":"nonsense"}}}}', "properties/a/items"),
    "reference": (GrammarKind.JSON_SCHEMA, '{"$ref":"#/nowhere"}', "/nowhere"),
    "nothing can be": (GrammarKind.JSON_SCHEMA, '{"type":"string","minLength":5,"maxLength":2}', "Unsatisfiable"),
    "not": (GrammarKind.JSON_SCHEMA, '{"properties":{"b":{"not":{"type":"string"}}}}', "properties/b"),
    "regex": (GrammarKind.REGEX, "(", "regex"),
    "look-ahead": (GrammarKind.REGEX, "(?=x)y", "look-around"),
    "lark": (GrammarKind.GRAMMAR, "start: nowhere", "nowhere"),
    "no list": (GrammarKind.CHOICE, '"a"', "array"),
    "empty list": (GrammarKind.CHOICE, "[]", "array"),
    "empty choice": (GrammarKind.CHOICE, '["a",""]', "array"),
}


@pytest.mark.parametrize(("kind", "text", "part"), BAD.values(), ids=BAD)
def test_a_faulty_grammar_is_refused(kind: GrammarKind, text: str, part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part) as caught:
        compiled(kind, text)
    assert caught.value.field == "grammar"
    assert kind.value in caught.value.message


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


EXPLODING = {
    "repeats": (GrammarKind.REGEX, "a{1000}{1000}{1000}"),
    "long repeat": (GrammarKind.REGEX, "a{2000000000}"),
    "product": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"allOf": [{"anyOf": [{"pattern": f"a{i}.*b{j}"} for i in range(8)]} for j in range(8)]}),
    ),
    "all at once": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"allOf": [{"type": "string", "pattern": f"[a-z]{{{i}}}"} for i in range(1, 40)]}),
    ),
    "all at once, in lark": (
        GrammarKind.GRAMMAR,
        "start: T\nT: " + " & ".join(f"/(.|\\n)*[a-z]{{{i}}}(.|\\n)*/" for i in range(1, 40)),
    ),
    "deep schema": (GrammarKind.JSON_SCHEMA, nested(2000)),
    "deep lark": (GrammarKind.GRAMMAR, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "deep regex": (GrammarKind.REGEX, "(" * 20_000 + "a" + ")" * 20_000),
}


@pytest.fixture
def brief_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the limit of CPU time for trying a grammar out, which is 3 s on a server, to 1 s."""
    monkeypatch.setattr(grammar_trial, "TRIAL_CPU_S", 1)


@pytest.mark.usefixtures("brief_trials")
@pytest.mark.parametrize(("kind", "text"), EXPLODING.values(), ids=EXPLODING)
def test_a_grammar_that_explodes_is_bounded(kind: GrammarKind, text: str) -> None:
    """A grammar whose compilation explodes costs at most 2 s of this thread and 150 MB, whether refused or not."""
    compiler = GrammarCompiler(Tokenizer.load(BUNDLED_TARGET), 2048)
    compiler.compile(GRAMMARS[2])
    started, before_kib = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(InvalidRequestError):
        walk(compiler.compile(Grammar(kind, text)), random.Random(1), limit=8)
    assert time.thread_time() - started < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 150 * 1024


@pytest.mark.usefixtures("brief_trials")
@pytest.mark.parametrize(
    "name", ["all at once", "all at once, in lark", "product", "deep schema", "deep lark", "deep regex"]
)
def test_a_grammar_without_bounds_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        compiled(*EXPLODING[name])


@pytest.mark.usefixtures("brief_trials")
def test_one_process_tries_grammars_out_until_one_exceeds_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars are compiled on trial in one process until one exceeds the limits; then a new process is started."""
    started = started_processes(monkeypatch)
    bombs = [Grammar(EXPLODING["all at once"][0], EXPLODING["all at once"][1].replace("[a-z]", "[b-z]"))] * 2
    for grammar in (Grammar(GrammarKind.REGEX, "first|second"), *bombs, Grammar(GrammarKind.REGEX, "third")):
        with contextlib.suppress(InvalidRequestError):
            COMPILER.compile(grammar)
    assert len(started) == 2


def started_processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """End the process in which grammars are tried out; return a list to which each new such process is appended."""
    grammar_trial._ended()
    started, start = list[subprocess.Popen[str]](), grammar_trial._started

    def note() -> subprocess.Popen[str]:
        started.append(start())
        return started[-1]

    monkeypatch.setattr(grammar_trial, "_started", note)
    return started


def test_a_trial_that_cannot_be_held_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process that tries a grammar out cannot start, or is killed, the error is internal, not the client's."""
    started = started_processes(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere")
        with pytest.raises(InternalError, match="nowhere"):
            grammar_trial.try_out('start: "0"')
    for text in "12":
        grammar_trial.try_out(f'start: "{text}"')
        started[-1].kill()
        started[-1].wait()
    grammar_trial.try_out('start: "3"')
    started[-1].send_signal(signal.SIGSTOP)
    threading.Timer(0.1, started[-1].kill).start()
    with pytest.raises(InternalError, match="killed"):
        grammar_trial.try_out('start: "4"')
    assert len(started) == 3


def test_a_trial_reports_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "_passes", lambda *_: False)
    with pytest.raises(ValueError, match=r"the limit is 3 s of a core, 1024 MiB"):
        grammar_trial.try_out('start: "a"')


@pytest.mark.parametrize("text", ["i\x7fj", "\x01\t\n", 'a"\\b', "\x85\u2028", "é😀", " lead", "|"], ids=ascii)
def test_a_choice_is_any_text(text: str) -> None:
    """A choice (one of the texts that an output must equal) may have any characters.

    Regression: a choice with U+007F was refused with "lexer error 1 | start:".
    """
    output = walk(compiled(GrammarKind.CHOICE, json.dumps([text])), random.Random(1), limit=40)
    assert TOKENIZER.decode(output) == text


def test_a_grammar_has_from_1_to_the_most_characters() -> None:
    with pytest.raises(InvalidRequestError, match=str(MAX_GRAMMAR_CHARACTERS)):
        Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_CHARACTERS + 1))
    with pytest.raises(InvalidRequestError, match="0 characters"):
        Grammar(GrammarKind.REGEX, "")


def test_a_model_without_an_end_has_no_grammars() -> None:
    endless = GrammarCompiler(Tokenizer(tiny_tokenizer(), frozenset([100_000])), DEFAULT_VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        endless.compile(GRAMMARS[0])


def test_a_model_may_lack_ids_of_its_tokenizer() -> None:
    """Grammars work if a model's vocabulary lacks ids that its tokenizer has.

    Regression: Gemma 3's small models lack the tokenizer's last id, so every grammar was refused for them.
    """
    for num_rows in (TOKENIZER.num_ids - 8, TOKENIZER.num_ids, DEFAULT_VOCAB_SIZE):
        matcher = GrammarCompiler(TOKENIZER, num_rows).compile(Grammar(GrammarKind.REGEX, "[ab]c+"))
        assert allowed_ids(matcher.masks((), ())[0]) == sorted(TOKENIZER.encode("a") + TOKENIZER.encode("b"))
