"""Identity of the model in a directory: a hash that all replicas of the model share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from specdec.inference.backends.digests import digests_of


def model_id_of(path: Path, *facts: str) -> str:
    """Return a hash, 16 hex digits, of a checkpoint's files and of all other facts that the model's tokens depend on.

    Args:
        facts: texts that name the arithmetic in use (such as the dtype that "auto" became), and the tokens and the
            length at which a sequence ends.
    """
    digest = hashlib.sha256(repr(facts).encode())
    for name, content in contents(path):
        digest.update(f"{name} {content}".encode())
    return digest.hexdigest()[:16]


def contents(path: Path, patterns: Sequence[str] = ("*.safetensors", "*.bin", "*.json")) -> list[tuple[str, str]]:
    """Return the name and SHA-256 of each file of a checkpoint that matches one of the patterns, sorted by name."""
    files = sorted({file for pattern in patterns for file in path.glob(pattern)})
    return list(zip((file.name for file in files), digests_of(files), strict=True))
