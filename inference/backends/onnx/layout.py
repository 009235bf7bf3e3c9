"""A folder of packed weights: its files, the version of their layout, its lock, and how a session over them is opened.

Who reads or makes one holds its lock, and nobody deletes what is held.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

import onnxruntime  # type: ignore[import-untyped]

LAYOUT_VERSION = 5  # of what this module writes
GRAPH_FILE, WEIGHTS_FILE, SHAPE_FILE, PROBE_FILE = "decoder.onnx", "weights.bin", "shape.json", "probe.npz"
CONFIG_FILE = "config.json"
LOCK_FILE = "lock"  # held by whoever reads or makes the folder
MAKING = "making-"  # how the names of unfinished folders begin


def session_options(num_threads: int) -> onnxruntime.SessionOptions:
    """Settings that packing and running share."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # The graph is fused by hand, and the packed weights belong to its very nodes.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False  # it would keep a plan for every number of tokens ever seen
    # Threads that spin while they wait take the cores away from the other model of the pair.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return options


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
