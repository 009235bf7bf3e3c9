"""Tests with real models' tokenizers: streams, grammars, tool calls, reasoning, stop strings, and pairs of families."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache

import pytest

from specdec.inference.gateway.answers.message import MessageReader
from specdec.inference.request import Grammar, GrammarKind
from specdec.inference.text.calls.formats import FORMATS, HERMES
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.grammar_words import GrammarWords
from specdec.inference.text.reasoning import BEGIN, END, Reasoning
from specdec.inference.text.stop_strings import StopStrings
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import token_map
from tests.support.grammars import literal_of, spelled, taken
from tests.support.marked import marked
from tests.world.packages import TOKENIZERS, templates, tokenizer_directory

pytestmark = pytest.mark.world

QUICK = ("qwen3", "llama2", "claude")
ALL = [each if each in QUICK else pytest.param(each, marks=pytest.mark.release) for each in TOKENIZERS]
PAIRS = [
    ("claude", "qwen3"),
    ("llama2", "claude"),
    *(
        pytest.param(draft, target, marks=pytest.mark.release)
        for draft, target in (
            ("qwen3", "llama3"),
            ("gemma3", "llama3_1"),
            ("llama3", "gemma3"),
            ("gptoss", "deepseek_v3"),
            ("llama2", "gpt4o"),
        )
    ),
]
"""Pairs of model families: whose tokenizer the draft has, and whose the target has."""
TEXTS = (
    "1, 2, 3, and on",
    "  Zürich 👍🏽, 東京\n\n\n\tx = [1,  2]\r\n",
    "e\u0301 \u2581 \u200d <table></table> \U0001f469\u200d\U0001f680",
    f"{BEGIN}a{END}<tool_call>{{}}</tool_call><|python_tag|>",
)
VALUE = {"city": "Zürich 👍", "n": [12, -0.5, None], "tag": "<b> </s> & <|im_end|> <think>"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "array"}, "tag": {"type": "string"}},
    "required": ["city", "n", "tag"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Real:
    """A real model's tokenizer, with a compiler of grammars for it."""

    tokenizer: Tokenizer
    compiler: GrammarCompiler
    words: GrammarWords

    def letters(self, text: str) -> list[int]:
        """Return a text's token ids; special tokens and markers in it are spelled as ordinary text."""
        return self.words(text.encode())

    def own(self, text: str) -> list[int]:
        """Return a text's token ids as the model would write it: markers such as <tool_call> are its special tokens."""
        markers = self.tokenizer.markers
        parts = re.split("|".join(map(re.escape, markers)).join("()"), text) if markers else [text]
        return [each for part in parts if part for each in ([markers[part]] if part in markers else self.letters(part))]


@cache
def real(name: str) -> Real:
    tokenizer = Tokenizer.load(tokenizer_directory(name))
    words = GrammarWords(tokenizer, tokenizer.num_ids, tokenizer.eos_token_ids)
    return Real(tokenizer, GrammarCompiler(tokenizer, tokenizer.num_ids), words)


@pytest.mark.parametrize("name", ALL)
def test_a_stream_is_the_decoded_text(name: str) -> None:
    tokenizer, rng = real(name).tokenizer, random.Random(5)
    drawn = [rng.choices(range(tokenizer.num_ids), k=30) for _ in range(200)]
    for token_ids in (*map(tokenizer.encode, TEXTS), *drawn):
        stream = tokenizer.stream()
        assert "".join(map(stream.push, token_ids)) + stream.rest() == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["const", "property", "regex", "choice", "lark"])
def test_literals_are_text(name: str, kind: str) -> None:
    """A literal in a grammar is spelled as ordinary text, even if it is the name of a special token.

    Regression: `json_schema` ended such literals before that name.
    """
    tokenizer, compiler = real(name).tokenizer, real(name).compiler
    added = tokenizer.backend.get_added_tokens_decoder()
    names = [
        added[each].content
        for each in sorted({*list(added)[:2], *list(added)[-2:], *compiler.eos_token_ids} & added.keys())
    ]
    for text in ("".join(names), f"a{names[-1]}b", "e\u0301 \u2581 東京", "<s></s><think><table>"):
        grammar, expected = literal_of(kind, text)
        assert spelled(compiler, tokenizer, grammar) == expected


@pytest.mark.parametrize("name", ALL)
def test_right_texts_are_taken(name: str) -> None:
    """Each kind of grammar accepts its output as the tokenizer spells it; a special token does not count as text."""
    each = real(name)
    text = json.dumps(VALUE, ensure_ascii=False, separators=(",", ":"))
    right = {
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)): text,
        Grammar(GrammarKind.REGEX, r"[^\n]*\n+[a-z]+ [0-9]{3}"): "Größe 👍:\n\nabc 123",
        Grammar(GrammarKind.CHOICE, json.dumps(["東京", "東 京", "other"])): "東 京",
        Grammar(GrammarKind.GRAMMAR, 'start: "(" start ")" | WORD\nWORD: /[a-zé<>]+/'): "((<é>))",
    }
    for grammar, expected in right.items():
        assert taken(each.compiler, grammar, each.letters(expected)), expected
    [*special] = sorted(each.tokenizer.special_ids - each.compiler.eos_token_ids)[:20]
    anything = each.compiler.compile(Grammar(GrammarKind.REGEX, r"(.|\n)*"))
    assert not any(anything.num_allowed((), [token_id]) for token_id in special)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("grammar", "text"), marked().values(), ids=marked())
def test_markers_are_taken_as_tokens_and_as_letters(name: str, grammar: Grammar, text: str) -> None:
    each = real(name)
    for token_ids in (each.own(text), each.letters(text)):
        assert each.tokenizer.text_of(token_ids) == text
        assert taken(each.compiler, grammar, token_ids), token_ids


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("form", FORMATS)
def test_calls_and_reasoning_are_read_from_tokens(name: str, form: str) -> None:
    """A stream of tokens is divided into reasoning, content and calls, whether marks are special tokens or letters."""
    each, format_ = real(name), FORMATS[form]
    call = f'{{"name": "f", "{format_.key}": {{"city": "Zürich 👍"}}}}'
    text = f"{BEGIN}\nhm <b>\n{END}\n\n{format_.before}{call}{format_.after}"
    for token_ids in (each.own(text), each.letters(text)):
        reader = MessageReader(Reasoning(begun=False), format_.reader(frozenset(["f"])), one_call=False)
        stream = each.tokenizer.stream(each.tokenizer.shown_markers(calls=True))
        readings = [reader.push(stream.push(token_id), is_last=False) for token_id in token_ids]
        readings.append(reader.push(stream.rest(), is_last=True))
        assert "".join(reading.reasoning for reading in readings) == "hm <b>"
        assert "".join(reading.content for reading in readings).strip() == ""
        arguments = "".join(call.arguments for reading in readings for call in reading.calls.values())
        assert json.loads(arguments) == {"city": "Zürich 👍"}


@pytest.mark.parametrize("name", ALL)
def test_stop_strings_cut_at_their_first_character(name: str) -> None:
    tokenizer = real(name).tokenizer
    for text in TEXTS[:3]:
        for stop in (text[3:6], text[-2:], "not there"):
            stops, stream, found = StopStrings((stop,)), tokenizer.stream(), ""
            for each in tokenizer.encode(text):
                found += "" if stops.found else stops.push(stream.push(each))
            found += "" if stops.found else stops.push(stream.rest()) + stops.rest()
            assert found == tokenizer.decode(tokenizer.encode(text)).partition(stop)[0]


@pytest.mark.parametrize(
    ("draft", "target"),
    PAIRS,
)
def test_a_draft_of_another_family_reads_the_same_text(draft: str, target: str) -> None:
    own, other = real(draft).tokenizer, real(target).tokenizer
    translation = token_map(own, own.num_ids, other, min_share=0.05)
    for text in TEXTS[:3]:
        token_ids = real(target).letters(text)
        assert own.text_of(translation.read(token_ids)) == text


FORMS = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
}
"""Models whose templates write tool calls in a format that this project reads, with the format's name."""


@pytest.mark.release
def test_templates_show_their_form_of_calls() -> None:
    """Of real models' chat templates, exactly those of `FORMS` are found to write tool calls in a format read here."""
    directory = tokenizer_directory("qwen3")
    base = Tokenizer.load(directory)
    found = {name: base.with_template(each, directory).call_format() for name, each in templates().items()}
    assert len(found) > len(FORMS)
    assert {name: each for name, each in found.items() if each} == FORMS


def test_the_template_of_a_package_writes_calls_in_a_form_that_is_read() -> None:
    assert real("qwen3").tokenizer.call_format() == next(name for name, each in FORMATS.items() if each is HERMES)
