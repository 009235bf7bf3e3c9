"""Which model a directory holds: a hash that other replicas of the same model have too."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_PATTERNS = ("*.safetensors", "*.bin", "config.json")
_DIGITS = 16


def model_identity(path: Path, *facts: str) -> str:
    """16 hex digits over a checkpoint's files: names, sizes, and samples of their bytes, spread evenly.

    Reading all of a large model would take longer than loading it does; two models that differ nowhere in the samples
    do not occur by training.

    Args:
        facts: what else the logits depend on.
    """
    digest = hashlib.sha256(repr(facts).encode())
    for file in sorted(file for pattern in _PATTERNS for file in path.glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for sample in range(_SAMPLES):
                opened.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:_DIGITS]
