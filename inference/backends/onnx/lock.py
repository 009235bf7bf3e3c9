"""Locks on folders of packed weights: who reads or makes one holds it, and nobody deletes what is held."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from inference.backends.onnx.layout import LOCK_FILE, MAKING


class FolderLock:
    """A lock on a folder, until it is closed or forgotten, or its process ends however it ends.

    Args:
        folder: exists.
        exclusive: nobody else has any; else others may share it, and the folder may be one that only others write.

    Raises:
        OSError: it cannot be had now.
    """

    def __init__(self, folder: Path, *, exclusive: bool = False) -> None:
        self._file: int | None = _opened(folder / LOCK_FILE, read_only=not exclusive)
        try:
            fcntl.flock(self._file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Let it go."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()


def _opened(file: Path, *, read_only: bool) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:  # a cache of another user's, or of an image: whoever made it made the file
        if not read_only:
            raise
        return os.open(file, os.O_RDONLY)


def remove_unused(folder: Path, *, min_age_s: float = 0.0) -> None:
    """Delete a folder that nobody has locked, and that is not younger than so many seconds."""
    with suppress(OSError):  # others may delete it, too
        if time.time() - folder.stat().st_mtime < min_age_s:
            return
        lock = FolderLock(folder, exclusive=True)
        # Under another name: with the file of the lock gone, somebody could lock, and read, what is left.
        condemned = folder.rename(folder.with_name(f"{MAKING}{folder.name}-{secrets.token_hex(4)}"))
        shutil.rmtree(condemned, ignore_errors=True)
        lock.close()
