"""Imitation of a bucket mounted by Mountpoint for Amazon S3: patched file functions refuse what Mountpoint refuses.

As in its SEMANTICS.md: no renaming, links, locks, or changes of times and modes; no overwriting; no deleting unless
the mount allows it. A file is written from beginning to end, cannot be written after a sync, and is visible once it is
closed. Folders are local until a file is in them.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REFUSED = {
    **dict.fromkeys(("rename", "replace"), errno.EXDEV),
    **dict.fromkeys(("link", "symlink", "truncate"), errno.ENOTSUP),
    **dict.fromkeys(("chmod", "chown", "utime", "setxattr"), errno.EPERM),
}
DELETING = ("unlink", "remove", "rmdir")
CHANGING = ("w", "x", "a", "+")


class Killed(BaseException):
    """Raised by a file operation to imitate that the process was killed there, while it published a model."""


class Mountpoint:
    """A folder that behaves as an S3 bucket mounted by Mountpoint, once `mount` has patched the file functions.

    Args:
        root: the folder; it is made if it does not exist.
        is_read_only: whether the mount refuses all writing.
        deletes: whether the mount allows deleting files and folders.

    Attributes:
        operations: number of writing operations so far.
        is_dead: whether the process counts as killed.
        killed_at: number of the operation, from 0 on, at which the process is killed; nothing is written from then on.
            None: it is never killed.
    """

    def __init__(self, root: Path, *, is_read_only: bool = False, deletes: bool = False) -> None:
        self.root, self._is_read_only, self._deletes = root, is_read_only, deletes
        self._uploads = root.parent / f"{root.name}-uploads"
        self._open_uploads: set[Path] = set()
        self._synced: set[int] = set()
        self.is_dead = False
        self.operations = 0
        self.killed_at: int | None = None
        root.mkdir(exist_ok=True)
        self._uploads.mkdir(exist_ok=True)

    def mount(self, patch: pytest.MonkeyPatch) -> None:
        """Patch `open` and functions of `os` to keep Mountpoint's rules in this folder, until `patch` is undone."""
        self._open, self._rename, self._fsync = io.open, os.rename, os.fsync
        for name, number in REFUSED.items():
            patch.setattr(os, name, self._refusing(getattr(os, name), number))
        for name in DELETING:
            patch.setattr(os, name, self._refusing(getattr(os, name), errno.EPERM, unless=self._deletes))
        patch.setattr(os, "mkdir", self._counting(os.mkdir))
        patch.setattr(os, "open", self._descriptor(os.open))
        patch.setattr(os, "fsync", self._sync)
        for module in (io, builtins):
            patch.setattr(module, "open", self._opened)

    def restart(self) -> None:
        """Imitate the start of a new process after a killed one; files that the killed one had open are lost."""
        self.is_dead, self.killed_at = False, None
        self._open_uploads.clear()

    def step(self) -> None:
        """Count a writing operation.

        Raises:
            Killed: the process is killed at this operation.
            OSError: the process was killed earlier.
        """
        if self.is_dead:
            raise OSError(errno.EIO, "the process was killed")
        if self.operations == self.killed_at:
            self.is_dead = True
            raise Killed
        self.operations += 1

    def holds(self, path: object, folder: int | None = None) -> bool:
        if not isinstance(path, str | os.PathLike):
            return False
        where = Path(os.readlink(f"/proc/self/fd/{folder}")) if folder is not None else Path.cwd()
        return (where / os.fspath(path)).is_relative_to(self.root)

    def _refusing(self, function: Callable[..., Any], number: int, *, unless: bool = False) -> Callable[..., Any]:
        def called(*arguments: Any, **keywords: Any) -> Any:
            folders = [keywords.get(name) for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")]
            folder = next((each for each in folders if each is not None), None)
            if any(self.holds(path, folder) for path in arguments[:2]) and (self.is_dead or not unless):
                raise OSError(number, os.strerror(number), str(arguments[0]))
            return function(*arguments, **keywords)

        return called

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if self.holds(path) and not Path(path).is_dir():
                self._check_writable()
                self.step()
            return function(path, *arguments, **keywords)

        return called

    def _descriptor(self, function: Callable[..., int]) -> Callable[..., int]:
        """Return an `os.open` that refuses to write in this folder: writers use `open`, which checks each write."""

        def called(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
            if self.holds(path, keywords.get("dir_fd")) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
            return function(path, flags, *arguments, **keywords)

        return called

    def _check_writable(self) -> None:
        if self._is_read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def _opened(self, path: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if not self.holds(path) or not any(letter in mode for letter in CHANGING):
            return self._open(path, mode, *arguments, **keywords)
        place = Path(path)
        self._check_writable()
        if "+" in mode or "a" in mode or place.exists() or place in self._open_uploads:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        if not place.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self.step()
        self._open_uploads.add(place)
        upload = self._uploads / f"{self.operations}-{place.name}"
        return Upload(self, self._open(upload, mode.replace("x", "w"), *arguments, **keywords), upload, place)

    def _sync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self._synced.add(descriptor)

    def is_synced(self, descriptor: int) -> bool:
        return descriptor in self._synced

    def forget_sync(self, descriptor: int) -> None:
        self._synced.discard(descriptor)

    def show(self, upload: Path, place: Path) -> None:
        """Move a closed file to its final path, where readers can see it."""
        self._open_uploads.discard(place)
        self._rename(upload, place)


class Upload:
    """A file in the mounted bucket that is open for writing; readers see it only after it is closed."""

    def __init__(self, mountpoint: Mountpoint, file: Any, upload: Path, place: Path) -> None:
        self._mountpoint, self._file, self._upload, self._place = mountpoint, file, upload, place

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, content: Any) -> int:
        if self._mountpoint.is_synced(self._file.fileno()):
            raise OSError(errno.EIO, "written to after a sync")
        self._mountpoint.step()
        return int(self._file.write(content))

    def fileno(self) -> int:
        return int(self._file.fileno())

    def flush(self) -> None:
        self._file.flush()

    def seek(self, *_: object) -> int:
        raise OSError(errno.EINVAL, "out of order write NOT supported")

    truncate = seek

    def close(self) -> None:
        self._mountpoint.forget_sync(self.fileno())  # the next file may have its number
        self._file.close()
        if self._mountpoint.is_dead:  # Killed is on its way out
            return
        self._mountpoint.step()
        self._mountpoint.show(self._upload, self._place)
