"""Which model a directory holds: a hash that other replicas of the same model have too."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

_PATTERNS = ("*.safetensors", "*.bin", "*.json")
_DIGITS = 16
_BLOB = re.compile(r"[0-9a-f]{64}")
"""How the Hugging Face cache names a file that is kept as a whole: by its SHA-256."""


def model_identity(path: Path, *facts: str) -> str:
    """16 hex digits over all of a checkpoint's files, and over what else its tokens depend on.

    Args:
        facts: the arithmetic as it was resolved, not as it was asked for; the tokens that end a sequence.
    """
    digest = hashlib.sha256(repr(facts).encode())
    for name, content in contents(path):
        digest.update(f"{name} {content}".encode())
    return digest.hexdigest()[:_DIGITS]


def contents(path: Path) -> list[tuple[str, str]]:
    """(name, SHA-256) of a checkpoint's files.

    A file is read once, not at every start: its hash is kept beside inode and times, of which no tool sets the last
    (ctime), so that other contents of the same size and date are not taken for it.
    """
    files = sorted({file for pattern in _PATTERNS for file in path.glob(pattern)})
    return [(file.name, _content(file)) for file in files]


def cache_root() -> Path:
    """Where this project keeps what it makes of checkpoints."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"


def _content(file: Path) -> str:
    real = file.resolve()
    if _BLOB.fullmatch(real.name):
        return real.name
    status = real.stat()
    times = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    known = cache_root() / "hashes" / hashlib.sha256(repr((str(real), times)).encode()).hexdigest()
    with suppress(OSError, ValueError):
        return str(json.loads(known.read_text())["sha256"])
    with real.open("rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    with suppress(OSError):  # a cache that cannot be written costs the time of reading again
        _keep(known, content)
    return content


def _keep(known: Path, content: str) -> None:
    known.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=known.parent, delete=False) as out:
        json.dump({"sha256": content}, out)
    Path(out.name).rename(known)
