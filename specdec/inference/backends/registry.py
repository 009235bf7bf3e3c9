"""Registry of the backends, by the name in `ModelConfig.backend`.

Imports a backend only when it is asked for: listing names needs no torch.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from specdec.inference.backends.devices import DEVICE, take_cores
from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.config import NO_TIME, ModelConfig
from specdec.inference.errors import ConfigError, MissingPackageError, RoomError, UnsupportedModelError
from specdec.inference.model.decoder import CompiledDecoder, Decide
from specdec.inference.model.slots import Array, Backend, Span

logger = logging.getLogger(__name__)

# name -> module and its loading function, ModelConfig -> Backend
LOADERS = {
    "torch": ("specdec.inference.backends.pytorch.backend", "load_torch_backend"),
    "onnx": ("specdec.inference.backends.onnx.backend", "load_onnx_backend"),
    "neuron": ("specdec.inference.backends.neuron.backend", "load_neuron_backend"),
    "transformers-neuronx": ("specdec.inference.backends.neuron.legacy", "load_legacy_backend"),
}
# name -> module and the function that loads a pair into one graph, (target, draft, decide) -> CompiledDecoder or None
DECODER_LOADERS = {"neuron": ("specdec.inference.backends.neuron.decoders.fused", "load_fused_decoder")}
# name -> module and the function that compiles ahead of time, (target or None, draft or None) -> None
COMPILERS = {
    "neuron": ("specdec.inference.backends.neuron.decoders.fused", "compile_models"),
    "torch": ("specdec.inference.backends.pytorch.backend", "compile_models"),
}
# role -> module and the function that does its work on files and yields a line for each
TOOLS = {
    "artifacts": ("specdec.inference.backends.neuron.storage.upkeep", "report"),
    "rescale_fp8": ("specdec.inference.backends.neuron.checkpoints.rescaling", "rescale"),
}
DEVICES = Path("/dev")
CANNOT_FORK = frozenset({"neuron", "transformers-neuronx"})
"""Backends that cannot copy a slot: a draft model there proposes a single path, and needs no slots for branches."""
COMPILED_SLOTS = ("always", "only")
"""Policies of `--compile` under which a model has exactly the slots that it was compiled for."""
TORCH_COST = "on a CPU its passes take 1.3 times (110M parameters) to 4 times (12M) as long"
"""Cost of backend torch in comparison with backend onnx, for messages."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Bytes of a weight by dtype."""
AUTO = "auto"
"""Value of `ModelConfig.backend` that asks for the fastest backend.

That is onnx for int8, and on a CPU for models that it can run; torch for all else.
"""


@dataclass(frozen=True, slots=True)
class Fit:
    """Form in which a model would be served, found from its files without loading it.

    Attributes:
        architecture: class name of the model in Transformers, such as LlamaForCausalLM.
        backend: name of the backend that would load it.
        reason: why this backend is chosen.
        dtype: arithmetic of the linear layers.
        max_length: positions of a slot.
        slot_bytes: memory of a slot's keys and values, once all positions are filled.
        num_parameters: number of the model's weights.
        weight_bytes: memory of all weights; a pass reads nearly all of them.
    """

    architecture: str
    backend: str
    reason: str
    dtype: str
    max_length: int
    slot_bytes: int
    num_parameters: int
    weight_bytes: int


def available_memory() -> int:
    """Return the bytes that processes of this machine can still take."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def examine(config: ModelConfig) -> Fit:
    """Return how a model would be served, from its configuration and the headers of its files; load no weights.

    Raises:
        ConfigError: the model would not be served; the message says what to change.
    """
    from specdec.inference.backends.architectures import (
        architecture_name,
        num_kept_values,
        require_supported_config,
        resolve_length,
    )
    from specdec.inference.backends.checkpoint import load_config, require_fitting
    from specdec.inference.backends.onnx.shape import HEAD_MULTIPLE

    files = CheckpointFiles(config.path)
    files.require_weights()
    files.require_tokenizer()
    stored = load_config(config.path)
    length = resolve_length(stored, config.sequence_length)
    require_supported_config(stored, length, windows=True)
    require_fitting(config.path, stored)
    backend, reason = _chosen(config, stored)
    is_onnx, dtype = backend == "onnx", _dtype_of(backend, config)
    num_values = num_kept_values(stored, HEAD_MULTIPLE if is_onnx else 1)
    slot_bytes = num_values * (length + is_onnx) * (4 if is_onnx else ITEM_BYTES[dtype])  # onnx keeps one more row
    number = files.num_parameters
    return Fit(
        architecture_name(stored), backend, reason, dtype, length, slot_bytes, number, number * ITEM_BYTES[dtype]
    )


def _asked(config: ModelConfig) -> tuple[str, str] | None:
    """Return the name of the backend that settings alone decide on, and the reason; None if the model decides.

    Raises:
        ConfigError: no backend has the name that is asked for.
    """
    if config.backend not in (AUTO, *LOADERS):
        raise ConfigError(f"backend {config.backend} is none of {AUTO}, {', '.join(sorted(LOADERS))}")
    if config.backend != AUTO:
        return config.backend, "it is asked for by --backend"
    if config.dtype == "int8":
        return "onnx", "it is asked for by --dtype int8"
    if config.device == DEVICE or (config.device == "auto" and _has_cuda()):
        return "torch", "it is the one for CUDA and Neuron devices"
    return None


def _chosen(config: ModelConfig, stored: Any) -> tuple[str, str]:
    """Return the name of the backend that would load a model, and the reason.

    Args:
        stored: Transformers' configuration of the model.

    Raises:
        UnsupportedModelError: settings ask for backend onnx, which cannot run the model.
    """
    from specdec.inference.backends.onnx.shape import require_llama_shaped

    asked = _asked(config)
    if asked is None and (config.device not in ("auto", "cpu") or config.dtype not in ("auto", "float32")):
        return "torch", f"device {config.device} or dtype {config.dtype} is not onnx's"
    if asked is not None and asked[0] != "onnx":
        return asked
    try:
        require_llama_shaped(stored.get_text_config())
    except UnsupportedModelError as error:
        if asked is not None:
            raise
        return "torch", f"{error}; {TORCH_COST}"
    fastest = "the fastest one on a CPU; torch if the test at loading finds other logits than Transformers'"
    return asked or ("onnx", fastest)


def _dtype_of(backend: str, config: ModelConfig) -> str:
    """Return the dtype in which a backend would compute; raise ConfigError if it lacks the device or the dtype."""
    if backend == "onnx":
        from specdec.inference.backends.onnx import backend as onnx

        return onnx.resolve_dtype(config)
    from specdec.inference.backends.pytorch import backend as pytorch

    return str(pytorch.resolve_dtype(config.dtype, pytorch.resolve_device(config.device))).removeprefix("torch.")


def load_backend(config: ModelConfig) -> Backend:
    """Load the model that a configuration describes.

    Raises:
        ConfigError: no backend has this name, or the model cannot be used.
    """
    asked = _asked(config)
    if config.backend == AUTO and config.device == "auto" and any(DEVICES.glob("neuron[0-9]*")):
        unused = "model %s: this machine has Neuron devices, and they stay idle without --backend or --device neuron"
        logger.warning(unused, config.name)
    backend = _load_fastest(config) if asked is None else _load(asked[0], config)
    if config.pass_time != NO_TIME:
        text = "EMULATED: a pass of model %s lasts at least %s, part of it asleep: these are not this machine's figures"
        logger.warning(text, config.name, config.pass_time)
        backend = emulated(
            backend, lambda spans: config.pass_time.seconds(len(spans), sum(len(it.token_ids) for it in spans))
        )
    return backend


def emulated(backend: Any, seconds_of: Callable[[Sequence[Span]], float]) -> Any:
    """Make a backend slower, as an emulated device is, and return it: each pass takes `seconds_of(spans)` or longer.

    While a device computes, its host is idle. So a pass sleeps until the device would be done, and leaves the cores
    free.
    """
    forward = backend.forward

    def at_least(spans: Sequence[Span]) -> Array:
        end = time.monotonic() + seconds_of(spans)
        logits = forward(spans)
        time.sleep(max(0.0, end - time.monotonic()))
        return logits

    backend.forward = at_least
    return backend


def load_decoder(target: ModelConfig, draft: ModelConfig | None, decide: Decide) -> CompiledDecoder | None:
    """Load both models into one decoder; return None if their backend cannot, or the configuration does not ask for it.

    Args:
        draft: draft model; None if the target runs without one.
        decide: function that chooses tokens and verifies, for decoders whose model returns logits instead of tokens.

    Raises:
        ConfigError: the models cannot be used together.
    """
    if target.backend not in DECODER_LOADERS or (draft is not None and target.backend != draft.backend):
        return None
    decoder: CompiledDecoder | None = _function(DECODER_LOADERS[target.backend])(target, draft, decide)
    return decoder


def has_fixed_slots(config: ModelConfig) -> bool:
    """Return whether a model has just the slots it was compiled for, so that none can be added to keep prefixes."""
    is_compiled = config.device == DEVICE or config.compile_policy in COMPILED_SLOTS
    return config.backend in CANNOT_FORK or is_compiled


def compile_models(target: ModelConfig | None, draft: ModelConfig | None) -> None:
    """Compile models ahead of time. The compiler is that of the target's backend, or, without a target, of the draft's.

    Args:
        target, draft: the models; one of them may be None.

    Raises:
        ConfigError: their backend compiles nothing, or a model cannot be used.
    """
    asked = [config.backend for config in (target, draft) if config is not None]
    for backend in asked:
        if backend not in COMPILERS:
            raise ConfigError(f"backend {backend} compiles nothing: {' and '.join(sorted(COMPILERS))} do")
    _function(COMPILERS[asked[0]])(target, draft)


def tool(role: str) -> Callable[..., Iterator[Any]]:
    """Return the function, listed in TOOLS, that does the work of a role of the command line, such as rescale_fp8.

    What it takes, and what it yields for each line of the output, differs by role.
    """
    run: Callable[..., Iterator[Any]] = _function(TOOLS[role])
    return run


def _load_fastest(config: ModelConfig) -> Backend:
    """Load a model by backend onnx, or by torch if onnx cannot run it; log why."""
    try:
        return _load("onnx", config)
    except RoomError:  # torch has no more
        raise
    except Exception as error:  # a model it cannot run, a full disk; torch reports a broken model in its own words
        backend = _load("torch", config)
        cost = TORCH_COST if config.device in ("auto", "cpu") else f"on {config.device}"
        logger.warning("model %s: backend torch, because %s; %s", config.path.name, error, cost)
        return backend


def _has_cuda() -> bool:
    if not Path("/proc/driver/nvidia").exists():  # saves the seconds of importing torch
        return False
    import torch

    return torch.cuda.is_available()


def _load(name: str, config: ModelConfig) -> Backend:
    """Load a model by the backend called `name`, one of LOADERS.

    Raises:
        MissingPackageError: a package that the backend needs is not installed.
    """
    if config.device == DEVICE:  # importing torch starts the device's runtime, which then has its cores
        take_cores(config.neuron.cores, tp_degree=1)
    try:
        load = _function(LOADERS[name])
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"backend {name}", error.name) from error
    backend: Backend = load(config)
    return backend


def _function(place: tuple[str, str]) -> Any:
    module, name = place
    return getattr(import_module(module), name)
