"""What of a growing text must wait, because it may turn out to be the beginning of a marker."""

from __future__ import annotations


def split_held(text: str, marker: str) -> tuple[str, str]:
    """What is certain, and what is not: an end that the marker may begin with, and the whitespace before it."""
    longest = min(len(text), len(marker) - 1)
    length = next(n for n in range(longest, -1, -1) if marker.startswith(text[len(text) - n :]))
    certain = text[: len(text) - length].rstrip()
    return certain, text[len(certain) :]
