"""Folder of packed weights: names of its files, options of ONNX Runtime's sessions over them, and the folder's lock.

Each process that uses or makes a folder holds the folder's lock until it ends; no process deletes a locked folder.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

import onnxruntime  # type: ignore[import-untyped]

LAYOUT_VERSION = 7  # of what this module writes
GRAPH_FILE, WEIGHTS_FILE, SHAPE_FILE, PROBE_FILE = "decoder.onnx", "weights.bin", "shape.json", "probe.npz"
CONFIG_FILE = "config.json"
LOCK_FILE = "lock"  # held by each process that reads or makes the folder
MAKING = "making-"  # how the names of unfinished folders begin


def session_options(num_threads: int) -> onnxruntime.SessionOptions:
    """Return the options of all sessions of ONNX Runtime here: those that pack weights and those that run passes.

    They leave the graph unchanged, since packed weights fit only its original nodes.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # The graph is fused by hand, and the packed weights fit only its original nodes.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False  # it would keep a memory plan for every number of tokens that occurred
    # Threads that spin while they wait take the cores away from the other model of the pair.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return options


class FolderLock:
    """Lock on a folder. It ends with `close`, with the object, or with the process, however the process ends.

    Args:
        folder: existing folder.
        exclusive: True for a lock beside which no other may exist. A shared lock needs no right to write to the folder.

    Raises:
        OSError: another process has a lock that excludes this one, or the lock's file cannot be opened.
    """

    def __init__(self, folder: Path, *, exclusive: bool = False) -> None:
        self._file: int | None = _opened(folder / LOCK_FILE, read_only=not exclusive)
        try:
            fcntl.flock(self._file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()


def _opened(file: Path, *, read_only: bool) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:  # another user's cache, or an image's: its maker made the file
        if not read_only:
            raise
        return os.open(file, os.O_RDONLY)


def remove_unused(folder: Path, *, min_age_s: float = 0.0) -> None:
    """Delete a folder if no process has locked it and it is at least `min_age_s` seconds old; else do nothing."""
    with suppress(OSError):  # others may delete it, too
        if time.time() - folder.stat().st_mtime < min_age_s:
            return
        lock = FolderLock(folder, exclusive=True)
        # Renamed first: once the lock's file is gone, another process could lock and read the rest.
        condemned = folder.rename(folder.with_name(f"{MAKING}{folder.name}-{secrets.token_hex(4)}"))
        shutil.rmtree(condemned, ignore_errors=True)
        lock.close()
