"""Prompts of many lengths and scripts, equal on every run."""

from __future__ import annotations

_TEXT = "the and in on at or her sing wind 7 12 = { } ( ) : ; naïve Ünïcode 東京 Жизнь 🙂 return print while count ten"
_WORDS = _TEXT.split()


def _text(number: int) -> str:
    """Return a text of 1 to 12 words from several scripts, the same for the same number."""
    return " ".join(_WORDS[(number * 7 + step * (number + 3)) % len(_WORDS)] for step in range(1 + number % 12))


PROMPTS = tuple(f"{number} {_text(number)}" for number in range(56))
"""56 different prompts."""
