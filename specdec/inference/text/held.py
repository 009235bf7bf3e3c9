"""Split of a growing text into what is certain, and an end that may be the beginning of a marker such as </think>."""

from __future__ import annotations


def split_held(text: str, marker: str) -> tuple[str, str]:
    """Return a growing text in two parts: what can be passed on, and an end that must wait for more text.

    The second part is the longest end of the text that may be the beginning of `marker`, with the whitespace before it.
    """
    longest = min(len(text), len(marker) - 1)
    length = next(n for n in range(longest, -1, -1) if marker.startswith(text[len(text) - n :]))
    certain = text[: len(text) - length].rstrip()
    return certain, text[len(certain) :]
