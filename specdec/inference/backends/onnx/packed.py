"""Packed weights: a file of matrices in the form that ONNX Runtime's kernels read, made once and memory-mapped.

ONNX Runtime rearranges ("prepacks") the matrices of each graph when it loads it, into memory of that graph. With
`session.save_external_prepacked_constant_initializers` it can write the result to a file. If a later load gives the
same bytes, it maps them from the file and frees its own copy. All graphs of a process, and all processes of a machine,
then share one copy. The file also keeps the plain form of each matrix, since ONNX Runtime finds a match only after it
has rearranged that form.

A file fits one checkpoint, one version of the library and one kind of processor; the folder's name contains all three.
The graphs of a loaded model map the folder's files, so a process locks the folder until the process ends. No process
deletes a locked folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]

from specdec.inference.backends.architectures import StoredConfig
from specdec.inference.backends.digests import user_cache
from specdec.inference.backends.host import instruction_sets
from specdec.inference.backends.identity import contents
from specdec.inference.backends.onnx.graph import is_constant
from specdec.inference.backends.onnx.layout import (
    CONFIG_FILE,
    GRAPH_FILE,
    LAYOUT_VERSION,
    PROBE_FILE,
    SHAPE_FILE,
    WEIGHTS_FILE,
    FolderLock,
    remove_unused,
)
from specdec.inference.backends.onnx.shape import DecoderShape
from specdec.inference.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedDecoder:
    """Decoder with its packed weights in a folder on disk.

    Attributes:
        folder: folder of the weights' file.
        dtype: arithmetic of the linear layers, "float32" or "int8".
        config: Transformers' configuration of the checkpoint, as read back from JSON.
        shape: sizes and settings of the decoder, on which the graph depends.
        weights: initializers that refer to the weights' file.
        probe_token_ids: tokens of the test at loading, in which the graph's logits must be those of Transformers.
        probe_logits: logits of these tokens in Transformers, float32 [num_tokens, vocab_size].
        narrow_logits: the same with the narrow sliding windows of `DecoderShape.narrowed`.
        lock: lock that keeps the folder from being deleted while it is open.
    """

    folder: Path
    dtype: str
    shape: DecoderShape
    config: StoredConfig
    weights: tuple[onnx.TensorProto, ...]
    probe_token_ids: list[int]
    probe_logits: np.ndarray[Any, np.dtype[np.float32]]
    narrow_logits: np.ndarray[Any, np.dtype[np.float32]]
    lock: FolderLock

    def narrowed(self) -> PackedDecoder:
        """Return this decoder for a test of sliding windows: with windows narrower than the test's few tokens.

        Its expected logits are those of Transformers with these windows.
        """
        return replace(self, shape=self.shape.narrowed(), probe_logits=self.narrow_logits)


def packed_decoder(path: Path, dtype: str, sequence_length: int | None) -> PackedDecoder:
    """Return the checkpoint's packed form in "float32" or "int8"; make it if the cache lacks it.

    Args:
        sequence_length: positions of a slot that are asked for; a model that cannot serve as many is not packed.

    Raises:
        ConfigError: the checkpoint cannot be used, or the cache cannot be written.
    """
    folder = folder_of(path, dtype)
    require_private(folder.parents[1])
    if folder.exists():
        try:
            return read(folder, dtype)
        except Exception as error:  # whatever the readers of the files' formats raise about a damaged one
            logger.warning("model %s: its packed form at %s cannot be read: %r", path.name, folder, error)
            remove_unused(folder)
    from specdec.inference.backends.onnx.packing import (
        make,  # torch and Transformers take seconds to import, only to make it
    )

    make(path, folder, dtype, sequence_length)
    if folder_of(path, dtype) != folder:
        remove_unused(folder)  # its weights may be of the old files or of the new
        raise ConfigError(f"model {path}: its files were replaced while they were being read")
    return read(folder, dtype)


def discard(decoder: PackedDecoder) -> None:
    """Delete a packed form that turned out not to give Transformers' logits, unless another process uses it."""
    decoder.lock.close()
    remove_unused(decoder.folder)


def require_private(folder: Path) -> None:
    """Raise ConfigError if the cache is another user's or writable to anybody, since its graphs are executed."""
    if not folder.exists():
        return
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"the cache {folder} is another user's, or anybody may write to it")


def folder_of(path: Path, dtype: str) -> Path:
    """Return the folder of a packed form, inside the folder of its checkpoint and dtype.

    Its name changes with the checkpoint's files, the library and the processor.
    """
    place = path.resolve()
    return user_cache() / "onnx" / f"{place.name}-{dtype}-{_digest(str(place))}" / _digest(_facts(path))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _facts(path: Path) -> list[object]:
    """Return the facts that the packed form depends on: the checkpoint's files, the library and the processor."""
    return [LAYOUT_VERSION, onnxruntime.__version__, instruction_sets(), *contents(path)]


def read(folder: Path, dtype: str) -> PackedDecoder:
    """Read a packed form, and lock its folder; raise an error of any type if a file is missing or damaged."""
    lock = FolderLock(folder)
    try:
        return _read_locked(folder, dtype, lock)
    except BaseException:
        lock.close()
        raise


def _read_locked(folder: Path, dtype: str, lock: FolderLock) -> PackedDecoder:
    shape = DecoderShape.load(folder / SHAPE_FILE)
    config = StoredConfig(**json.loads((folder / CONFIG_FILE).read_text()))
    graph = onnx.load(str(folder / GRAPH_FILE), load_external_data=False).graph
    weights = tuple(tensor for tensor in graph.initializer if not is_constant(tensor.name))
    if not weights:
        raise ValueError(f"{GRAPH_FILE} refers to no weights")
    _require_all(weights, folder / WEIGHTS_FILE)
    probe = np.load(folder / PROBE_FILE)
    token_ids, logits, narrow_logits = probe["token_ids"].tolist(), probe["logits"], probe["narrow_logits"]
    return PackedDecoder(folder, dtype, shape, config, weights, token_ids, logits, narrow_logits, lock)


def _require_all(weights: Iterable[onnx.TensorProto], file: Path) -> None:
    """Raise ValueError if the file is too short for its references: reading mapped memory past its end is fatal."""
    size = file.stat().st_size
    for tensor in weights:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries and int(entries["offset"]) + int(entries["length"]) > size:
            raise ValueError(f"{file} ends before {tensor.name}")
