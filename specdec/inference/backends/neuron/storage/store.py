"""A folder of compiled models, on any file system: a local disk, or an object store that is mounted.

S3 Mountpoint, the strictest, has no rename, no lock and no link; it neither overwrites nor deletes, writes a file
only from beginning to end, and shows it once it is closed. So publishing never changes an existing file. A publication
has a folder of its own, KEY/PUBLICATION; its manifest is written last, and readers ignore a folder without a manifest.
If two processes finish the same model at once, both publications stay, and every reader takes the same one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.inference.backends.digests import digest_of
from specdec.inference.errors import ConfigError

MANIFEST = "specdec.json"
STARTED = "started.json"
CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Publication:
    """A compiled model in a store, finished or not.

    Attributes:
        folder: folder of the compiled model, KEY/PUBLICATION in the store.
        manifest: conditions of its compilation, and `files`: size and digest by name; None if it is not finished.
    """

    folder: Path
    manifest: Mapping[str, Any] | None

    @property
    def key(self) -> str:
        return self.folder.parent.name

    @property
    def started(self) -> dict[str, Any]:
        """Host, process id and time at which compiling began; empty if the record is lost."""
        return _read_object(self.folder / STARTED) or {}

    @property
    def size_bytes(self) -> int:
        """Total size of the files that the manifest names."""
        return sum(file["bytes"] for file in (self.manifest or {}).get("files", {}).values())

    def is_whole(self) -> bool:
        """Return whether the model is finished and every file has its size; reads no content."""
        return self.manifest is not None and not any(self._faults(reads=False))

    def faults(self) -> list[str]:
        """Return the faults of the model as text; reads every file."""
        return ["not finished"] if self.manifest is None else list(self._faults(reads=True))

    def _faults(self, *, reads: bool) -> Iterator[str]:
        for name, file in (self.manifest or {}).get("files", {}).items():
            path = self.folder / name
            if not path.is_file():
                yield f"{name} is missing"
            elif path.stat().st_size != file["bytes"]:
                yield f"{name} has {path.stat().st_size} bytes, not {file['bytes']}"
            elif reads and digest_of(path) != file["sha256"]:
                yield f"{name} has another content than was published"


def read_publication(folder: Path) -> Publication:
    """Return the publication in a folder; a manifest that was cut short counts as none."""
    return Publication(folder, _read_object(folder / MANIFEST))


def _read_object(file: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, TypeError, ValueError):  # lost, or cut short
        return None


def publications(root: Path) -> list[Publication]:
    """Return all publications of a store, sorted by key and name."""
    folders = sorted(folder for key in _folders(root) for folder in _folders(key))
    return [each for each in map(read_publication, folders) if each.manifest or (each.folder / STARTED).is_file()]


def find(root: Path, key: str) -> Path | None:
    """Return the folder of a finished model, the same for every reader; None if there is none."""
    found = (read_publication(folder) for folder in sorted(_folders(root / key)))
    return next((publication.folder for publication in found if publication.is_whole()), None)


def begin(root: Path, key: str) -> Path:
    """Create and return the folder of a publication; called before compiling, so that a read-only store fails at once.

    Raises:
        ConfigError: the store takes no files.
    """
    folder = root / key / uuid.uuid4().hex[:12]
    started = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.strftime("%FT%TZ", time.gmtime())}
    try:
        folder.mkdir(parents=True)
        _write_text(folder / STARTED, json.dumps(started))
    except OSError as error:
        raise ConfigError(
            f"compiled models cannot be written to {root}, which has none of key {key}: {error}"
        ) from error
    return folder


def publish(made: Path, folder: Path, manifest: Mapping[str, Any]) -> None:
    """Move a finished model into its folder in the store, file by file, and write the manifest last.

    Args:
        made: local folder in which the model was compiled.
        folder: its folder in the store, as `begin` returned it.
        manifest: its manifest without `files`, which is added here.

    Raises:
        ConfigError: the store refuses a file.
    """
    files = [file for file in sorted(made.rglob("*")) if file.is_file()]
    described = {
        file.relative_to(made).as_posix(): {"bytes": file.stat().st_size, "sha256": digest_of(file)} for file in files
    }
    try:
        for file in files:
            _bring(file, folder / file.relative_to(made))
        text = json.dumps({**manifest, "files": described}, indent=2, sort_keys=True, default=str)
        _write_text(folder / MANIFEST, text + "\n")
    except OSError as error:
        raise ConfigError(f"a compiled model cannot be written to {folder}: {error}; it is kept in {made}") from error


def discard(folder: Path) -> bool:
    """Delete a publication, its manifest first. Return whether it is gone, since some stores delete nothing."""
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists() and not any(_folders(folder.parent)):
        shutil.rmtree(folder.parent, ignore_errors=True)
    return not folder.exists()


def _folders(parent: Path) -> list[Path]:
    return [entry for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []


def _bring(file: Path, place: Path) -> None:
    """Move a file: rename it within one file system, else copy it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(file, place)
    except OSError:
        _copy(file, place)


def _copy(file: Path, place: Path) -> None:
    with file.open("rb") as source, place.open("xb") as copy:
        shutil.copyfileobj(source, copy, CHUNK_BYTES)
        copy.flush()
        os.fsync(copy.fileno())  # an object store reports here whether it took the file


def _write_text(place: Path, text: str) -> None:
    with place.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
