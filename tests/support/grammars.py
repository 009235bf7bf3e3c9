"""Grammars compiled for the tiny tokenizer of the tests, and random outputs that their token masks allow."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

import numpy as np

from specdec.inference.engine.grammars import Grammars
from specdec.inference.request import Grammar, GrammarKind
from specdec.inference.text.grammar import GrammarCompiler, GrammarMatcher
from specdec.inference.text.tokenizer import Tokenizer
from tests.support.models import DEFAULT_VOCAB_SIZE, EOS_TOKEN_ID, tiny_tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer(), frozenset([EOS_TOKEN_ID]))
COMPILER = GrammarCompiler(TOKENIZER, DEFAULT_VOCAB_SIZE)


def grammars() -> Grammars:
    """Return what an engine compiles grammars with: a compiler that works in threads of its own."""
    return Grammars(COMPILER)


def compiled(kind: GrammarKind, text: str) -> GrammarMatcher:
    return COMPILER.compile(Grammar(kind, text))


def allowed_ids(mask: bytes | None) -> list[int]:
    assert mask is not None
    ids: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    return ids


def walk(matcher: GrammarMatcher, rng: random.Random, *, limit: int) -> list[int]:
    """Draw a random output that the grammar's token masks allow, up to its end token, or of `limit` tokens."""
    output: list[int] = []
    while len(output) < limit:
        choices = allowed_ids(matcher.masks(output, ())[0])
        ends = EOS_TOKEN_ID in choices and (len(output) > limit // 2 or rng.random() < 0.2)
        output.append(EOS_TOKEN_ID if ends else rng.choice(choices))
        if output[-1] == EOS_TOKEN_ID:
            break
    return output


def is_whole(output: Sequence[int]) -> bool:
    return output[-1] == EOS_TOKEN_ID


def literal_of(kind: str, text: str) -> tuple[Grammar, str]:
    """Return a grammar that allows exactly one output, made of `text`, and that output.

    `kind` is const or property (JSON schemas), regex, choice, or lark (a Lark grammar).
    """
    quoted = json.dumps(text, ensure_ascii=False)
    closed = {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
    return {
        "const": (Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"const": text})), quoted),
        "property": (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(closed)), f"{{{quoted}:1}}"),
        "regex": (Grammar(GrammarKind.REGEX, re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)), text),
        "choice": (Grammar(GrammarKind.CHOICE, json.dumps([text])), text),
        "lark": (Grammar(GrammarKind.GRAMMAR, f"start: {quoted}"), text),
    }[kind]


def spelled(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar) -> str:
    """Return the text of the output that takes the lowest allowed token id at each step, without its end token."""
    matcher, output = compiler.compile(grammar), list[int]()
    while not compiler.eos_token_ids & {*output[-1:]}:
        output.append(allowed_ids(matcher.masks(output, ())[0])[0])
    return b"".join(map(tokenizer.token_bytes, output[:-1])).decode()


def taken(compiler: GrammarCompiler, grammar: Grammar, token_ids: Sequence[int]) -> bool:
    """Return whether the grammar's token masks allow these tokens one after the other, and then an end token."""
    matcher, output = compiler.compile(grammar), [*token_ids, min(compiler.eos_token_ids)]
    return all(each in allowed_ids(matcher.masks(output[:i], ())[0]) for i, each in enumerate(output))
