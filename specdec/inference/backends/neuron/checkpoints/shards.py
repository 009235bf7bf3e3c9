"""Reading of a checkpoint's JSON and of the tensors in its safetensors files (shards)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from specdec.inference.errors import ConfigError


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise ConfigError if the file cannot be read or holds something else."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return value


def open_shard(file: Path) -> Any:
    """Open a safetensors file as a context manager with torch tensors; raise ConfigError if it cannot be read."""
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def bytes_of(tensor: Any) -> bytes:
    """Return the bytes of a torch tensor of any dtype."""
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
