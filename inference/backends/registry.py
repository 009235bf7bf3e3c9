"""Which backends there are, by the name that `ModelConfig.backend` carries.

Imports a backend only when it is asked for: listing names needs no torch.
"""

from __future__ import annotations

from importlib import import_module

from inference.config import ModelConfig
from inference.errors import ConfigError
from inference.types import Backend

# name -> module and its loading function, ModelConfig -> Backend
LOADERS = {"torch": ("inference.backends.pytorch", "load_torch_backend")}


def load_backend(config: ModelConfig) -> Backend:
    """Load a model as its configuration says.

    Raises:
        ConfigError: no backend has this name, or the model cannot be used.
    """
    if config.backend not in LOADERS:
        raise ConfigError(f"backend {config.backend} is none of {', '.join(sorted(LOADERS))}")
    module, function = LOADERS[config.backend]
    backend: Backend = getattr(import_module(module), function)(config)
    return backend
