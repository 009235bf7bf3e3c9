"""The safetensors files of a checkpoint: which there are, and what their headers say. Knows no model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from inference.errors import ConfigError

INDEX = "model.safetensors.index.json"


def read_json(file: Path) -> dict[str, Any]:
    """A file's JSON object; ConfigError if it has none."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return value


def shards_of(folder: Path) -> list[Path]:
    """Its safetensors files: those of the index where there is one, else all."""
    if not (folder / INDEX).exists():
        return sorted(folder.glob("*.safetensors"))
    weight_map = read_json(folder / INDEX).get("weight_map")
    names = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
    if not names or any(Path(name).name != name for name in names):
        raise ConfigError(f"{folder / INDEX} has no weight_map that names files beside it")
    return [folder / name for name in sorted(names)]


def open_shard(file: Path) -> Any:
    """A context: a safetensors file whose tensors are torch's. ConfigError if it is none, or is cut short."""
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Kind:
    """What a shard's header says of a tensor; its dtype as safetensors calls it."""

    dtype: str
    shape: tuple[int, ...]


def kinds_of(file: Path) -> dict[str, Kind]:
    """Of a shard's tensors by name; reads none."""
    with open_shard(file) as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        return {name: Kind(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


def bytes_of(tensor: Any) -> bytes:
    """Of a torch tensor of any dtype."""
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
