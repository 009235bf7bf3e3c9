"""End of a growing text that must wait, because it may be the beginning of a marker."""

from __future__ import annotations


def split_held(text: str, marker: str) -> tuple[str, str]:
    """Return the certain part of a growing text, and the rest: its last spaces and an end that may begin `marker`."""
    longest = min(len(text), len(marker) - 1)
    length = next(n for n in range(longest, -1, -1) if marker.startswith(text[len(text) - n :]))
    certain = text[: len(text) - length].rstrip()
    return certain, text[len(certain) :]
