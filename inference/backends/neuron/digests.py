"""What a checkpoint is by content: a digest of each file that a compilation reads. Times and places do not count.

Two machines that downloaded one model find each other's compiled models so. Reading a large checkpoint takes minutes:
digests are remembered in the user's cache, for as long as a file is untouched.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
NUM_READERS = 8
"""Files that are read at once: hashing releases Python's lock."""
SHA256_DIGITS = 64


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """This project's folder in the user's cache."""
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "specdec"


def identity_of(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of config.json and of every weight file, by name.

    Args:
        checkpoint: a model directory, or a file of weights.
    """
    files = [checkpoint] if checkpoint.is_file() else _files_of(checkpoint)
    with ThreadPoolExecutor(NUM_READERS) as readers:
        return dict(zip((file.name for file in files), readers.map(_remembered, files), strict=True))


def digest_of(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _files_of(folder: Path) -> list[Path]:
    config = folder / "config.json"
    weights = [file for kind in WEIGHTS for file in sorted(folder.glob(kind))]
    return [config, *weights] if config.is_file() else weights


def _remembered(file: Path) -> str:
    place = file.resolve()
    if place.parent.name == "blobs" and len(place.name) == SHA256_DIGITS:  # of the hub's cache: its name is its digest
        return place.name
    stat = place.stat()
    # The time of change cannot be set, as that of modification can: a file that was replaced by a copy has a new one.
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
    except (OSError, ValueError, KeyError, TypeError):  # none, or half of one
        return None


def _write_note(note: Path, untouched: list[int], digest: str) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as file:
            file.write(json.dumps({"untouched": untouched, "sha256": digest}))
        os.replace(file.name, note)
    except OSError:  # a home that cannot be written to: the next start reads the checkpoint again
        return
