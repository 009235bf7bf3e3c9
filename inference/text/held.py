"""End of a growing text that must wait, because it may be the beginning of a marker."""

from __future__ import annotations


def split_held(text: str, marker: str) -> tuple[str, str]:
    """Split a growing text before the end that may begin `marker`, and before the spaces there; return both parts."""
    longest = min(len(text), len(marker) - 1)
    length = next(n for n in range(longest, -1, -1) if marker.startswith(text[len(text) - n :]))
    certain = text[: len(text) - length].rstrip()
    return certain, text[len(certain) :]
