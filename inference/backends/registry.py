"""Which backends there are, by the name that `ModelConfig.backend` carries.

Imports a backend only when it is asked for: listing names needs no torch.
"""

from __future__ import annotations

import logging
from importlib import import_module

from inference.config import ModelConfig
from inference.errors import ConfigError
from inference.types import Backend

logger = logging.getLogger(__name__)

# name -> module and its loading function, ModelConfig -> Backend
LOADERS = {
    "torch": ("inference.backends.pytorch", "load_torch_backend"),
    "onnx": ("inference.backends.onnx_backend", "load_onnx_backend"),
}
AUTO = "auto"
"""onnx where it runs the model, on a CPU; torch elsewhere."""


def load_backend(config: ModelConfig) -> Backend:
    """Load a model as its configuration says.

    Raises:
        ConfigError: no backend has this name, or the model cannot be used.
    """
    if config.backend == AUTO:
        return _load_fastest(config)
    if config.backend not in LOADERS:
        raise ConfigError(f"backend {config.backend} is none of {AUTO}, {', '.join(sorted(LOADERS))}")
    return _load(config.backend, config)


def _load_fastest(config: ModelConfig) -> Backend:
    if config.device == "auto" and _has_cuda():
        return _load("torch", config)
    try:
        return _load("onnx", config)
    except ConfigError as error:  # if the model itself is at fault, torch says so again
        logger.info("model %s: backend torch, because %s", config.path.name, error)
        return _load("torch", config)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _load(name: str, config: ModelConfig) -> Backend:
    module, function = LOADERS[name]
    try:
        load = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        raise ConfigError(f"backend {name} needs the package {error.name}, which is not installed") from error
    backend: Backend = load(config)
    return backend
