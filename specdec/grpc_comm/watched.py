"""Files that are read again when they change, without a restart.

If the new version is unusable, the last good one stays in use. Operators replace certificates and tokens while a server
runs, in one step or in several, sometimes with faults.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class UnusableError(Exception):
    """Failure to use files; the message is one line that names them."""


class Watched(Generic[T]):
    """Value that is made from files, and made again when they change. Any thread may call `get`.

    Each `get` costs a stat of each file, some microseconds.

    Args:
        paths: the files.
        read: function that reads the files and returns the value; it raises UnusableError or OSError.

    Raises:
        UnusableError: the files cannot be used at first. Later the value of their last usable version stays.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._stamp = self._look()
        self.is_stale = False
        """True if the files have changed and their new version cannot be used."""
        self._value = self._try()

    def get(self) -> T:
        """Return the value of the latest usable version."""
        with self._lock:
            stamp = self._look()  # before reading, so that a write meanwhile is seen at the next look
            if stamp != self._stamp:
                self._stamp = stamp
                Context().run(self._renew)  # its lines belong to no request that happens to look
            return self._value

    def _renew(self) -> None:
        try:
            self._value, self.is_stale = self._try(), False
            logger.info("reloaded after a change: %s", ", ".join(map(str, self._paths)))
        except UnusableError as exc:
            self.is_stale = True
            logger.error("the version before stays in use: %s", exc)

    def _try(self) -> T:
        try:
            return self._read()
        except OSError as exc:
            raise UnusableError(f"{exc.filename or self._paths[0]}: {exc.strerror or exc}") from exc

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
