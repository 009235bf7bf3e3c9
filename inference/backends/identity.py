"""Which model a directory holds: a hash that other replicas of the same model have too."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from inference.backends.digests import digests_of


def model_id_of(path: Path, *facts: str) -> str:
    """16 hex digits over all of a checkpoint's files, and over what else its tokens depend on.

    Args:
        facts: the arithmetic as it was resolved, not as it was asked for; what ends a sequence.
    """
    digest = hashlib.sha256(repr(facts).encode())
    for name, content in contents(path):
        digest.update(f"{name} {content}".encode())
    return digest.hexdigest()[:16]


def contents(path: Path, patterns: Sequence[str] = ("*.safetensors", "*.bin", "*.json")) -> list[tuple[str, str]]:
    """(name, SHA-256) of a checkpoint's files."""
    files = sorted({file for pattern in patterns for file in path.glob(pattern)})
    return list(zip((file.name for file in files), digests_of(files), strict=True))
