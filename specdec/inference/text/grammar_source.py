"""Translation of each kind of grammar into the form that the library llguidance takes.

A grammar's preamble, which allows reasoning before the output, is translated too. No tokenizer is needed.

The whitespace of JSON and llguidance's limits are set here. Fuel is llguidance's unit of work, counted alike on every
machine; docs/structured.md has the cost of each limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from specdec.inference.request import Grammar, GrammarKind, Preamble
from specdec.inference.text.json_schema import adapted
from specdec.inference.text.reasoning import BEGIN, END

if TYPE_CHECKING:
    from llguidance import LLParserLimits

LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
COMPACT = {"whitespace_flexible": False}
"""Option of llguidance that allows JSON only without whitespace."""
_SEVERAL = '{"grammars"'
_MAX_MESSAGE = 300
_MARKER = re.compile(r'^(specdec_marker_\w+): "(.*)"$', re.MULTILINE)


class Markers:
    """Writer of literals for a Lark grammar, in which a rule stands for each marker such as <think>.

    A marker may be a token of the model, which only `GrammarCompiler` knows: it finds these rules by their names, and
    lets them match the token too. In any other program that reads the grammar, each rule matches the marker's letters.

    Args:
        texts: the markers, each a text within angle brackets.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._names = {text: "specdec_marker_" + re.sub(r"\W+", "", text.replace("/", "end_")) for text in texts}
        self._split = re.compile("|".join(map(re.escape, texts)).join("()"))

    def literal(self, text: str | None) -> str:
        """Return a text in Lark's syntax: literals, and the names of the rules of its markers; empty for None."""
        parts = filter(None, self._split.split(text or ""))
        return " ".join(self._names.get(part) or json.dumps(part, ensure_ascii=False) for part in parts)

    def anything_before(self, name: str, marker: str) -> str:
        """Return Lark rules, of which `name` is the main one, for any text that ends with `marker`.

        The rules use the terminal TEXT, which `complete` defines.
        """
        spelled = f"{name}_spelled[lazy]: TEXT {json.dumps(marker)}"
        return f"{name}: {name}_spelled | TEXT {self.literal(marker)}\n{spelled}\n"

    def complete(self, lark: str) -> str:
        """Return a Lark grammar with a rule added for each marker that it uses, and one for TEXT, which is any text."""
        rules = [f'{name}: "{text}"\n' for text, name in self._names.items() if name in lark]
        return "".join([lark, *rules, "TEXT: /(.|\\n)*/\n"])


def with_tokens(source: str, token_ids: Mapping[str, int]) -> str:
    """Return a grammar in llguidance's form, changed so that a marker may also be written by its own token.

    Args:
        source: the grammar, whose rules for markers were made by `Markers`.
        token_ids: id of each marker that is a token of the model.
    """

    def either(rule: re.Match[str]) -> str:
        token_id = token_ids.get(rule[2])
        return rule[0] if token_id is None else f'{rule[1]}: <[{token_id}]> | "{rule[2]}"'

    if not source.startswith(_SEVERAL) or not token_ids:
        return _MARKER.sub(either, source)
    grammars = json.loads(source)
    for each in grammars["grammars"]:
        if each.get("lark_grammar"):
            each["lark_grammar"] = _MARKER.sub(either, each["lark_grammar"])
    return json.dumps(grammars)


_MARKS = Markers((BEGIN, END))
_THOUGHT = f"{_MARKS.anything_before('thought', END)}SPACE: /\\s*/\n"
_PREAMBLES = {
    Preamble.REASONING: _MARKS.complete(f"start: ({_MARKS.literal(BEGIN)} thought SPACE)? @answer\n{_THOUGHT}"),
    Preamble.REST_OF_REASONING: _MARKS.complete(f"start: thought SPACE @answer\n{_THOUGHT}"),
}


@cache
def grammar_version() -> str:
    """Return a text that names all that a grammar's masks depend on: llguidance's version, and this project's rules.

    With another version other tokens are allowed, so an answer must be continued with the version that it began with.
    """
    return f"llguidance {version('llguidance')}, compact JSON, separate oneOf, markers as tokens"


@lru_cache(maxsize=64)  # GBNF takes seconds: converted on the compiling thread, not again when sent on
def source_of(grammar: Grammar) -> str:
    """Return a grammar, with its preamble, in llguidance's own form.

    Raises:
        ValueError: the grammar is malformed.
    """
    if grammar.preamble is Preamble.NONE:
        return _plain_source(grammar)
    return nested(_PREAMBLES[grammar.preamble], replace(grammar, preamble=Preamble.NONE), "answer").text


def written_out(grammar: Grammar) -> Grammar:
    """Return an equal grammar without a preamble, for servers of older versions, which know no preambles.

    If reasoning was allowed before the output, the returned grammar's own text allows it.
    """
    return grammar if grammar.preamble is Preamble.NONE else Grammar(GrammarKind.GRAMMAR, source_of(grammar))


def nested(lark: str, inner: Grammar, name: str) -> Grammar:
    """Return the Lark grammar `lark`, in which `inner` stands for the rule @NAME, `name` being that rule's name.

    `inner` may itself have a grammar nested in it.

    Raises:
        ValueError: `inner` is malformed.
    """
    source = _plain_source(inner)
    first, *others = json.loads(source)["grammars"] if source.startswith(_SEVERAL) else [{"lark_grammar": source}]
    named = [{**first, "name": name}, *others]
    return Grammar(GrammarKind.GRAMMAR, json.dumps({"grammars": [{"lark_grammar": lark}, *named]}))


def _plain_source(grammar: Grammar) -> str:
    from llguidance import LLMatcher, grammar_from

    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return source_of_schema(json.loads(grammar.text))
    if grammar.kind is GrammarKind.CHOICE:
        return LLMatcher.grammar_from_lark(_alternatives(grammar.text))
    if grammar.kind is GrammarKind.GRAMMAR and grammar.text.startswith(_SEVERAL):
        return grammar.text
    return grammar_from("regex" if grammar.kind is GrammarKind.REGEX else "grammar", grammar.text)


def source_of_schema(schema: Any) -> str:
    """Return a JSON schema in llguidance's form. Compiling the result fails if llguidance lacks one of its keywords.

    Raises:
        ValueError: the schema is malformed, in a way that shows before it is compiled.
    """
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(adapted(schema)), COMPACT)  # type: ignore[arg-type]


def _alternatives(text: str) -> str:
    choices: Any = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise ValueError("a JSON array of one or more texts is expected, none of them empty")
    literals = (json.dumps(each, ensure_ascii=False).replace("\x7f", r"\u007f") for each in choices)  # no raw DEL there
    return "start: " + " | ".join(literals)


def parser_limits() -> LLParserLimits:
    """Return `LIMITS`, the limits of a grammar's size and work, as the object that llguidance takes."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)  # type: ignore[arg-type]


def brief(message: str) -> str:
    """Return a message of llguidance as one line, cut to 300 characters, since it may quote a long text of a client."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]} ..."
