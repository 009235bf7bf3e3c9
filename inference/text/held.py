"""End of a growing text that must wait, because it may be the beginning of a marker."""

from __future__ import annotations


def split_held(text: str, marker: str) -> tuple[str, str]:
    """Split a text into a certain part and an end that must wait: spaces, and a possible beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    length = next(n for n in range(longest, -1, -1) if marker.startswith(text[len(text) - n :]))
    certain = text[: len(text) - length].rstrip()
    return certain, text[len(certain) :]
