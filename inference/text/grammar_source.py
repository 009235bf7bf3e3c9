"""Grammars in llguidance's own form, without a tokenizer: what each kind means, and what stands around it.

What is not the library's is decided here: the whitespace of JSON, and the limits. Fuel is its unit of work, counted
alike on every machine; docs/structured.md says what each limit costs.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from inference.request import Grammar, GrammarKind, Preamble
from inference.text.reasoning import BEGIN, END

if TYPE_CHECKING:
    from llguidance import LLParserLimits

VERSION = f"llguidance {version('llguidance')}, compact JSON"
"""Library and whitespace rule: others mask differently, so a sequence that began with one goes on with no other."""
LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
COMPACT = {"whitespace_flexible": False}
"""How JSON is written."""
TRIAL_S, TRIAL_CPU_S, TRIAL_BYTES = 8.0, 3, 1 << 30
_MEETING = re.compile(r'[&~]|\\u|("(?:pattern|format|multipleOf|And|Not).*){2}', re.DOTALL)
"""What stands where expressions meet: an operator, or what may be hidden behind an escape, or two of these words."""
_SEVERAL = '{"grammars"'
_MAX_MESSAGE = 300
_THOUGHT = f"thought[lazy]: /(.|\\n)*{END.replace('/', chr(92) + '/')}/\nSPACE: /\\s*/\n"
_PREAMBLES = {
    Preamble.REASONING: f'start: (begin thought SPACE)? @output\nbegin: "{BEGIN}"\n{_THOUGHT}',
    Preamble.REST_OF_REASONING: f"start: thought SPACE @output\n{_THOUGHT}",
}


@lru_cache(maxsize=64)  # GBNF takes seconds: on the thread that compiles it, and not again where it is sent on
def source_of(grammar: Grammar) -> str:
    """The grammar in the library's own form.

    Raises:
        ValueError: it is none.
    """
    if grammar.preamble is Preamble.NONE:
        return _plain_source(grammar)
    return nested(_PREAMBLES[grammar.preamble], replace(grammar, preamble=Preamble.NONE)).text


def written_out(grammar: Grammar) -> Grammar:
    """The same grammar for a peer that knows no preambles: they stand in its text."""
    return grammar if grammar.preamble is Preamble.NONE else Grammar(GrammarKind.GRAMMAR, source_of(grammar))


def nested(lark: str, output: Grammar) -> Grammar:
    """A grammar in Lark, in which another one goes by the name of @output.

    Raises:
        ValueError: the other one is none.
    """
    source = _plain_source(output)
    first, *others = json.loads(source)["grammars"] if source.startswith(_SEVERAL) else [{"lark_grammar": source}]
    named = [{**first, "name": "output"}, *others]
    return Grammar(GrammarKind.GRAMMAR, json.dumps({"grammars": [{"lark_grammar": lark}, *named]}))


def _plain_source(grammar: Grammar) -> str:
    from llguidance import LLMatcher, grammar_from

    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(grammar.text, COMPACT)  # type: ignore[arg-type]
    if grammar.kind is GrammarKind.CHOICE:
        return LLMatcher.grammar_from_lark(_alternatives(grammar.text))
    if grammar.kind is GrammarKind.GRAMMAR and grammar.text.startswith(_SEVERAL):
        return grammar.text
    return grammar_from("regex" if grammar.kind is GrammarKind.REGEX else "grammar", grammar.text)


def _alternatives(text: str) -> str:
    choices: Any = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise ValueError("a JSON array of one or more texts is expected, none of them empty")
    return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


@lru_cache(maxsize=64)
def try_out(source: str) -> None:
    """Compile a grammar in a process of its own, if expressions may meet in it. ValueError: it takes too much.

    Where several must hold at once, one unit of the library's work takes time and memory by the product of their
    branches: 1 kB of JSON schema kept a core for ever, and took all memory. No thread can be stopped.
    """
    if not _MEETING.search(source):
        return
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, text = [sys.executable, "-m", __name__, str(TRIAL_CPU_S)], source.encode()
    try:
        subprocess.run(command, input=text, env=path, capture_output=True, timeout=TRIAL_S, check=True)
    except (OSError, subprocess.SubprocessError) as exc:
        raise ValueError("too complex: too many ways for expressions to hold at once") from exc


def _try(cpu_s: int) -> None:
    """What the other process does. A grammar with a fault is none of its affair."""
    from llguidance import LLMatcher, LLTokenizer

    os.nice(5)  # others are being served
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    with suppress(ValueError):
        LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=parser_limits()).compute_bitmask()


def parser_limits() -> LLParserLimits:
    """`LIMITS` as the library has them."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)  # type: ignore[arg-type]


def brief(message: str) -> str:
    """One line of the library's words; a caller's own text may stand in them at any length."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]} ..."


if __name__ == "__main__":
    _try(int(sys.argv[1]))
