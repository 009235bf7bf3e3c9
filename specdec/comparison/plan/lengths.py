"""Prompts of normally distributed lengths: texts that are joined and cut, or random texts; a seed fixes both."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.errors import ConfigError

MAX_INPUT_TOKENS = 1_000_000


def draw_lengths(num_prompts: int, seed: int, mean: float, stddev: float = 0.0) -> list[int]:
    """Return as many normally distributed lengths of prompts as `num_prompts`, in tokens, none below 1.

    The same seed gives the same lengths.

    Raises:
        ConfigError: mean or deviation is out of range.
    """
    for name, value, least, most in (("mean", mean, 1.0, MAX_INPUT_TOKENS), ("stddev", stddev, 0.0, mean)):
        if not least <= value <= most:
            raise ConfigError(f"input_tokens: {name} {value:.12g} is outside {least:g}..{most:.12g}")
    chance = random.Random(seed)
    return [max(1, round(chance.gauss(mean, stddev))) for _ in range(num_prompts)]


class Characters:
    """Measure of text lengths without a tokenizer: pieces of four characters, about one token of English each.

    Attributes:
        vocabulary: pieces of text from which random texts are made.
    """

    vocabulary: Sequence[Any] = [" " + "".join(word) for word in itertools.product("bdfklmnrst", "aeiou", "bdfklmnrst")]

    def cut(self, text: str) -> Sequence[Any]:
        """Cut a text into pieces of four characters."""
        return [text[i : i + 4] for i in range(0, len(text), 4)]

    def join(self, pieces: Sequence[Any]) -> str:
        """Return the text that pieces from `cut` make together."""
        return "".join(pieces)


class Tokens(Characters):
    """Measure of text lengths in tokens of a model's tokenizer, without the special tokens that it adds to a prompt."""

    def __init__(self, model: Path) -> None:
        from specdec.inference.text.tokenizer import Tokenizer  # takes a while to import

        self._tokenizer = Tokenizer.load(model)
        self.vocabulary = range(CheckpointFiles(model).vocab_size)

    def cut(self, text: str) -> Sequence[Any]:
        """Return the token ids of a text."""
        return self._tokenizer.encode(text, special=False)

    def join(self, pieces: Sequence[Any]) -> str:
        """Return the text of token ids from `cut`, without incomplete characters at its ends."""
        return self._tokenizer.decode(pieces).strip("\ufffd")  # a character that was cut in two


def prompts_of_lengths(texts: Sequence[str], lengths: Sequence[int], seed: int, kind: Characters) -> tuple[str, ...]:
    """Return one prompt of each length: the texts in turn, each lengthened by the texts after it, then cut.

    Without texts the prompts are random; equal seeds give equal prompts.

    Args:
        lengths: number of pieces of each prompt.
        kind: measure that cuts texts into pieces; joined pieces may be fewer when they are cut again.
    """
    chance = random.Random(seed)
    return tuple(
        _shortened(_joined(texts, index, length, kind) if texts else _random(chance, length, kind), length, kind)
        for index, length in enumerate(lengths)
    )


def _random(chance: random.Random, length: int, kind: Characters) -> str:
    return kind.join(chance.choices(kind.vocabulary, k=2 * length + 8))  # encoded again, the text may have fewer


def _joined(texts: Sequence[str], first: int, length: int, kind: Characters) -> str:
    parts, num_pieces = [], 0
    for text in itertools.islice(itertools.cycle(texts), first % len(texts), None):
        parts.append(text)
        num_pieces += len(kind.cut(text))
        if num_pieces >= length and len(kind.cut("\n".join(parts))) >= length:  # joined, they may be fewer
            break
    return "\n".join(parts)


def _shortened(text: str, length: int, kind: Characters) -> str:
    """Return the longest beginning of a text that still has at most `length` pieces when it is cut again.

    The whole text is returned if no beginning is short enough.
    """
    cut = kind.cut(text)
    for num_pieces in range(length, 0, -1):
        shortened = kind.join(cut[:num_pieces])
        if shortened and len(kind.cut(shortened)) <= length:
            return shortened
    return text
