"""Grammars over the tiny tokenizer: their compiler, and random outputs that the masks allow."""

from __future__ import annotations

import random
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
    """Return a grammar compiler as engines have it, which compiles in its own threads."""
    return Grammars(COMPILER)


def compiled(kind: GrammarKind, text: str) -> GrammarMatcher:
    return COMPILER.compile(Grammar(kind, text))


def allowed_ids(mask: bytes | None) -> list[int]:
    assert mask is not None
    ids: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    return ids


def walk(matcher: GrammarMatcher, rng: random.Random, *, limit: int) -> list[int]:
    """Draw an output from the masks: random allowed tokens until the end token, or `limit`."""
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
