"""Safetensors files (shards) of a checkpoint: their names, and the dtypes and shapes in their headers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from specdec.inference.errors import ConfigError

INDEX = "model.safetensors.index.json"


def read_json(file: Path) -> dict[str, Any]:
    """Return a file's JSON object; raise ConfigError if it has none."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return value


def shards_of(folder: Path) -> list[Path]:
    """Return a folder's safetensors files: the files that its index names, or all files if it has no index."""
    if not (folder / INDEX).exists():
        return sorted(folder.glob("*.safetensors"))
    weight_map = read_json(folder / INDEX).get("weight_map")
    names = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
    if not names or any(Path(name).name != name for name in names):
        raise ConfigError(f"{folder / INDEX} has no weight_map that names files beside it")
    return [folder / name for name in sorted(names)]


def open_shard(file: Path) -> Any:
    """Open a safetensors file as a context manager with torch tensors; raise ConfigError if it cannot be read."""
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Kind:
    """Dtype, by safetensors' name, and shape of a tensor in a shard's header."""

    dtype: str
    shape: tuple[int, ...]


def kinds_of(file: Path) -> dict[str, Kind]:
    """Return the dtype and shape of each tensor in a shard, by tensor name; read only the header."""
    with open_shard(file) as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        return {name: Kind(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


def bytes_of(tensor: Any) -> bytes:
    """Return the bytes of a torch tensor of any dtype."""
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
