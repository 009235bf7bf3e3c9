"""SHA-256 digests of files, remembered in the user's cache until a file changes.

Every start of a server needs the model's id, which is made from the digests, and reading a large checkpoint takes
minutes. A copy of the model in another folder, or of another date, has the same id.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NUM_READERS = 8
"""Number of files that are hashed at once, in threads: hashing releases Python's global interpreter lock."""
SHA256_DIGITS = 64
"""Hexadecimal digits of a SHA-256."""


def user_cache() -> Path:
    """Return this project's folder in the user's cache, by default ~/.cache/specdec; it may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "specdec"


def digests_of(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file's content, in hexadecimal; a file that has not changed is not read again."""
    with ThreadPoolExecutor(NUM_READERS) as readers:
        return list(readers.map(_remembered, files))


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _remembered(file: Path) -> str:
    place = file.resolve()
    if place.parent.name == "blobs" and len(place.name) == SHA256_DIGITS:  # the hub's cache names files by digest
        return place.name
    stat = place.stat()
    # Programs can set a file's modification time, but not its change time, so a file replaced by a copy has a new one.
    untouched = [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    note = user_cache() / "digests" / hashlib.sha256(str(place).encode()).hexdigest()
    if (digest := _read_note(note, untouched)) is None:
        digest = digest_of(place)
        _write_note(note, untouched, digest)
    return digest


def _read_note(note: Path, untouched: list[int]) -> str | None:
    try:
        noted = json.loads(note.read_text())
        return str(noted["sha256"]) if noted["untouched"] == untouched else None
    except (OSError, ValueError, KeyError, TypeError):  # there is no note, or only half of one
        return None


def _write_note(note: Path, untouched: list[int], digest: str) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as file:
            file.write(json.dumps({"untouched": untouched, "sha256": digest}))
        os.replace(file.name, note)
    except OSError:  # a home that cannot be written to: the next start reads the checkpoint again
        return
