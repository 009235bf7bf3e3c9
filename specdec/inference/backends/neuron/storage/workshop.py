"""Local folder in which a model is compiled, with the compiler's own files; the result is then moved elsewhere."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.inference.backends.digests import user_cache

logger = logging.getLogger(__name__)

WORK_DIR = "BASE_COMPILE_WORK_DIR"
"""Environment variable with which NxDI finds its folder; if the user sets it, each compilation gets a folder in it."""
PROGRESS_S = 30.0
"""Seconds between two lines of progress; the compiler itself may print nothing for an hour."""


@contextmanager
def workshop(key: str) -> Iterator[Path]:
    """Yield an empty local folder to compile into, beside a folder for the compiler's own files.

    Both are deleted at the end; after an error they are kept, and the log says where.

    Args:
        key: name of the compiled model, for the folder's name and for messages.
    """
    parent = Path(os.environ.get(WORK_DIR) or user_cache() / "compiling").absolute()
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=parent))
    (folder / "made").mkdir()
    try:
        with _compiler_files(folder / "compiler"), _progress(key):
            yield folder / "made"
    except BaseException:
        logger.error("the compiler's files are kept in %s", folder)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _compiler_files(folder: Path) -> Iterator[None]:
    """Give the compiler a folder of its own: two compilers in one would overwrite each other's files."""
    before = os.environ.get(WORK_DIR)
    folder.mkdir()
    os.environ[WORK_DIR] = f"{folder}/"
    try:
        yield
    finally:
        if before is None:
            del os.environ[WORK_DIR]
        else:
            os.environ[WORK_DIR] = before


@contextmanager
def _progress(key: str) -> Iterator[None]:
    """Log progress from a separate thread, since the compiler blocks this one."""
    started, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(PROGRESS_S):
            logger.info("compiled model %s: compiling for %.0f s", key, time.monotonic() - started)

    reporter = threading.Thread(target=report, name="compile-progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
    logger.info("compiled model %s: compiled and stored in %.0f s", key, time.monotonic() - started)
