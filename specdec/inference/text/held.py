"""Search for the end of a growing text that must be held back, because it may be the beginning of a marker."""

from __future__ import annotations


def split_held(text: str, marker: str) -> tuple[str, str]:
    """Return a growing text in two parts; the second must be held back, since it may belong to a `marker`.

    The second part is the end of the text that may be the beginning of the marker, with the whitespace before it.
    """
    longest = min(len(text), len(marker) - 1)
    length = next(n for n in range(longest, -1, -1) if marker.startswith(text[len(text) - n :]))
    certain = text[: len(text) - length].rstrip()
    return certain, text[len(certain) :]
