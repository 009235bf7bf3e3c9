"""Locks on folders of packed weights: who reads or makes one holds it, and nobody deletes what is held."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from inference.backends.onnx.layout import LOCK_FILE


class FolderLock:
    """A lock on a folder, until it is closed or forgotten, or its process ends however it ends.

    Args:
        folder: exists.
        exclusive: nobody else has any; else others may share it.

    Raises:
        OSError: it cannot be had now.
    """

    def __init__(self, folder: Path, *, exclusive: bool = False) -> None:
        self._file: int | None = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
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


def remove_unused(folder: Path) -> None:
    """Delete a folder that nobody has locked."""
    with suppress(OSError):
        lock = FolderLock(folder, exclusive=True)
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()
