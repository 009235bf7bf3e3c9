"""Weights on disk in the form in which ONNX Runtime multiplies them, made once per checkpoint and memory-mapped.

ONNX Runtime rearranges matrices for its kernels when it loads them, which would be one copy per graph. Where it finds
the same bytes in a file that it wrote before (`session.save_external_prepacked_constant_initializers`), it maps the
file instead and drops its own: all graphs of a process, and all processes of a machine, share one copy in memory. The
file holds each matrix in both forms, because the search goes by the result of rearranging. The form belongs to one
version of the library on one kind of processor: both are part of the folder's name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from transformers import PretrainedConfig, PreTrainedModel

from inference.backends.checkpoint import load_weights
from inference.backends.onnx_graph import CONSTANTS, decoder_graph
from inference.backends.onnx_int8 import quantized_weights, weight_levels
from inference.backends.onnx_shape import DecoderShape, shape_of
from inference.backends.onnx_weights import Weight, decoder_weights
from inference.backends.processor import instruction_sets
from inference.errors import ConfigError

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 4  # of what this module writes
GRAPH_FILE, WEIGHTS_FILE, SHAPE_FILE, PROBE_FILE = "decoder.onnx", "weights.bin", "shape.json", "probe.npz"
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.json")
NUM_PROBE_TOKENS = 8
NamedArray: TypeAlias = "tuple[str, np.ndarray[Any, Any]]"
MAKING = "making-"  # how the names of unfinished folders begin


@dataclass(frozen=True, slots=True)
class PackedDecoder:
    """A decoder on disk.

    Attributes:
        folder: holds the weights' file.
        dtype: arithmetic of the linear layers, "float32" or "int8".
        weights: references into it, to be the initializers of a graph.
        probe_token_ids: some tokens.
        probe_logits: what Transformers makes of them, [num_tokens, vocab_size].
    """

    folder: Path
    dtype: str
    shape: DecoderShape
    weights: tuple[onnx.TensorProto, ...]
    probe_token_ids: list[int]
    probe_logits: Weight


def packed_decoder(path: Path, config: PretrainedConfig, dtype: str) -> PackedDecoder:
    """Return the checkpoint's packed form in "float32" or "int8"; make it if this is the first time.

    Raises:
        ConfigError: the checkpoint is broken, or the cache cannot be written.
    """
    folder = _cache_folder(path, dtype)
    if folder.exists():
        try:
            return _read(folder, dtype)
        except Exception as error:  # whatever the readers of the files' formats raise about a damaged one
            logger.warning("model %s: its packed form at %s cannot be read: %r", path.name, folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    _make(path, config, folder, dtype)
    return _read(folder, dtype)


def discard(decoder: PackedDecoder) -> None:
    """Forget a packed form that turned out not to give Transformers' logits."""
    shutil.rmtree(decoder.folder, ignore_errors=True)


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


def _cache_folder(path: Path, dtype: str) -> Path:
    """One folder per checkpoint and arithmetic, in it one per state of the checkpoint's files."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = path.resolve()
    return root / "specdec" / "onnx" / f"{place.name}-{dtype}-{_digest(str(place))}" / _digest(_facts(path))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _facts(path: Path) -> list[object]:
    """What the packed form depends on: the checkpoint's files, the library and the processor."""
    facts: list[object] = [LAYOUT_VERSION, onnxruntime.__version__, instruction_sets()]
    for file in sorted(file for pattern in WEIGHT_PATTERNS for file in path.glob(pattern)):
        status = file.stat()
        facts.append((file.name, status.st_size, status.st_mtime_ns))
    return facts


def _make(path: Path, config: PretrainedConfig, folder: Path, dtype: str) -> None:
    started = time.monotonic()
    model = load_weights(path, config, dtype=torch.float32, device=torch.device("cpu"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=MAKING) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            _write(model, made, dtype)
            _publish(made, folder)
    except OSError as error:
        raise ConfigError(f"model {path}: cannot keep its packed weights in {folder.parent}: {error}") from error
    logger.info("model %s: packed for ONNX Runtime in %.1f s, at %s", path.name, time.monotonic() - started, folder)


def _publish(made: Path, folder: Path) -> None:
    """Put the folder in its place, and remove those of earlier states of the checkpoint."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster, and made the same
            raise
    for other in folder.parent.iterdir():
        if other != folder and not other.name.startswith(MAKING):
            shutil.rmtree(other, ignore_errors=True)  # who has it mapped keeps what is mapped


def _write(model: PreTrainedModel, folder: Path, dtype: str) -> None:
    shape = shape_of(model.eval())
    plain = folder / "plain.bin"
    weights = _write_plain(_weights(model, shape, dtype), plain)
    graph = decoder_graph(shape, weights, dtype=dtype, num_places=1, room=NUM_PROBE_TOKENS)
    _write_packed(graph, folder)
    plain.unlink()
    shape.save(folder / SHAPE_FILE)
    token_ids = np.arange(NUM_PROBE_TOKENS) * 7919 % shape.vocab_size
    with torch.inference_mode():
        logits = model(torch.from_numpy(token_ids)[None], use_cache=False).logits[0]
    np.savez(folder / PROBE_FILE, token_ids=token_ids, logits=logits.numpy())


def _weights(model: PreTrainedModel, shape: DecoderShape, dtype: str) -> Iterator[NamedArray]:
    weights = decoder_weights(model, shape)
    return quantized_weights(weights, weight_levels()) if dtype == "int8" else weights


def _write_plain(weights: Iterable[NamedArray], file: Path) -> list[onnx.TensorProto]:
    """Write arrays behind one another; return references to them."""
    references = []
    with file.open("wb") as out:
        for name, array in weights:
            offset = out.tell()
            array.tofile(out)
            data_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            reference = onnx.TensorProto(name=name, data_type=data_type, dims=array.shape)
            reference.data_location = onnx.TensorProto.EXTERNAL
            location = {"location": file.name, "offset": str(offset), "length": str(array.nbytes)}
            for key, value in location.items():
                reference.external_data.add(key=key, value=value)
            references.append(reference)
    return references


def _write_packed(graph: onnx.ModelProto, folder: Path) -> None:
    """Let ONNX Runtime load the graph and write it again, with packed weights in a file beside it."""
    options = session_options(num_threads=1)
    options.optimized_model_filepath = str(folder / GRAPH_FILE)
    for key, value in {
        "session.model_external_initializers_file_folder_path": str(folder),
        "session.optimized_model_external_initializers_file_name": WEIGHTS_FILE,
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        "session.save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(key, value)
    onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _read(folder: Path, dtype: str) -> PackedDecoder:
    shape = DecoderShape.load(folder / SHAPE_FILE)
    graph = onnx.load(str(folder / GRAPH_FILE), load_external_data=False).graph
    weights = tuple(tensor for tensor in graph.initializer if tensor.name not in CONSTANTS)
    _require_all(weights, folder / WEIGHTS_FILE)
    probe = np.load(folder / PROBE_FILE)
    return PackedDecoder(folder, dtype, shape, weights, probe["token_ids"].tolist(), probe["logits"])


def _require_all(weights: Iterable[onnx.TensorProto], file: Path) -> None:
    """Raise where the file is shorter than its references say: reading mapped memory behind its end kills a process."""
    size = file.stat().st_size
    for tensor in weights:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries and int(entries["offset"]) + int(entries["length"]) > size:
            raise ValueError(f"{file} ends before {tensor.name}")
