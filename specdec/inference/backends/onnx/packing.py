"""Packing of a checkpoint's weights for ONNX Runtime. It needs Transformers and torch; `packed` reads the result."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specdec.inference.backends.architectures import require_supported_config, resolve_length
from specdec.inference.backends.checkpoint import load_config, load_weights
from specdec.inference.backends.onnx.graph import DecoderGraph
from specdec.inference.backends.onnx.int8 import quantized_weights, weight_levels
from specdec.inference.backends.onnx.layout import (
    CONFIG_FILE,
    GRAPH_FILE,
    LOCK_FILE,
    MAKING,
    PROBE_FILE,
    SHAPE_FILE,
    WEIGHTS_FILE,
    FolderLock,
    remove_unused,
    session_options,
)
from specdec.inference.backends.onnx.shape import PROBE_WINDOW, DecoderShape, Weight, require_llama_shaped, shape_of
from specdec.inference.backends.onnx.weights import decoder_weights
from specdec.inference.errors import ConfigError

logger = logging.getLogger(__name__)

NUM_PROBE_TOKENS = 8
SETTLED_S = 60.0
"""Least age in seconds at which an unlocked folder is deleted; a younger one's maker may not have locked it yet."""
NamedArray: TypeAlias = "tuple[str, np.ndarray[Any, Any]]"


def make(path: Path, folder: Path, dtype: str, sequence_length: int | None) -> None:
    """Pack the checkpoint at `path` into `folder`, with weights in "float32" or "int8" (`dtype`).

    Args:
        sequence_length: positions of a slot that are asked for; None: the model's own.

    Raises:
        ConfigError: the checkpoint cannot be used, is broken, or the cache cannot be written.
    """
    started = time.monotonic()
    config = load_config(path)
    require_supported_config(config, resolve_length(config, sequence_length), windows=True)
    require_llama_shaped(config.get_text_config())
    model = load_weights(path, config, dtype=torch.float32, device=torch.device("cpu"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=MAKING) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            with closing(FolderLock(Path(temporary), exclusive=True)):
                _write(model, made, dtype)
                _publish(made, folder)
    except OSError as error:
        raise ConfigError(f"model {path}: cannot keep its packed weights in {folder.parent}: {error}") from error
    megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    logger.info(
        "model %s: packed for ONNX Runtime in %.1f s: %.0f MB at %s, which may be deleted",
        *(path.name, time.monotonic() - started, megabytes, folder),
    )


def _publish(made: Path, folder: Path) -> None:
    """Move the finished folder to its place; delete unused folders of earlier states and of killed builds."""
    (made / LOCK_FILE).touch()  # a process that may only read the cache cannot make it
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():  # else another process has made the same files first
            raise
    for other in folder.parent.iterdir():
        if other != folder:
            remove_unused(other, min_age_s=SETTLED_S)


def _write(model: PreTrainedModel, folder: Path, dtype: str) -> None:
    shape = shape_of(model.eval())
    plain = folder / "plain.bin"
    weights = _write_plain(_weights(model, shape, dtype), plain)
    graph = DecoderGraph(shape, dtype, 1, NUM_PROBE_TOKENS).build(weights)
    _write_packed(graph, folder)
    plain.unlink()
    shape.save(folder / SHAPE_FILE)
    config = model.config.get_text_config()
    settings = {**config.to_dict(), "architectures": model.config.architectures}
    (folder / CONFIG_FILE).write_text(json.dumps(settings, default=str))
    token_ids = np.arange(NUM_PROBE_TOKENS) * 7919 % shape.vocab_size
    logits = _logits(model, token_ids)
    if any(shape.windows):
        config.sliding_window = PROBE_WINDOW  # from which Transformers makes masks
    np.savez(folder / PROBE_FILE, token_ids=token_ids, logits=logits, narrow_logits=_logits(model, token_ids))


@torch.inference_mode()
def _logits(model: PreTrainedModel, token_ids: NDArray[np.int64]) -> Weight:
    logits: Weight = model(torch.from_numpy(token_ids)[None], use_cache=False).logits[0].numpy()
    return logits


def _weights(model: PreTrainedModel, shape: DecoderShape, dtype: str) -> Iterator[NamedArray]:
    weights = decoder_weights(model, shape)
    return quantized_weights(weights, weight_levels()) if dtype == "int8" else weights


def _write_plain(weights: Iterable[NamedArray], file: Path) -> list[onnx.TensorProto]:
    """Write arrays to a file, one after another; return references to them, with name, type, shape and offset."""
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
