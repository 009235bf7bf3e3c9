"""What a checkpoint holds, and whether its fp8 is Neuron's. Reads headers, and of weights one tensor at most."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from inference.backends.neuron.fp8 import is_beyond_neuron
from inference.errors import ConfigError

logger = logging.getLogger(__name__)

E4M3 = "F8_E4M3"
MARK = "rescaled_to_neuron_fp8"
"""In config.json, beside what Transformers reads: it hands `quantization_config` to classes that may refuse a name."""
INDEX = "model.safetensors.index.json"


def read_json(file: Path) -> dict[str, Any]:
    """A file's JSON object; ConfigError if it has none."""
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


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


def check_rescaled(folder: Path) -> None:
    """Refuse E4M3 weights that Neuron would read as infinite or NaN.

    Without our mark the smallest such tensor of the first file that has one decides: who quantizes to 448 gives each
    tensor, row or block a scale that makes its largest value 448.

    Raises:
        ConfigError: it was not rescaled.
    """
    if not folder.is_dir() or ((folder / "config.json").exists() and MARK in read_json(folder / "config.json")):
        return
    sample = _sample(folder)
    if is_beyond_neuron(sample):
        remedy = f"python main.py --role rescale_fp8 --model {folder} --output {folder}-rescaled"
        raise ConfigError(f"{folder} has fp8 weights above 240, where Neuron's end: rescale it first: {remedy}")
    if sample:
        logger.warning("%s is not marked as rescaled to Neuron's fp8; a sample of it ends at 240", folder)


def _sample(folder: Path) -> bytes:
    """The smallest E4M3 tensor of the first file that has any; empty without one."""
    for file in shards_of(folder):
        sizes = {name: prod(kind.shape) for name, kind in kinds_of(file).items() if kind.dtype == E4M3}
        if sizes:
            with open_shard(file) as shard:
                return bytes_of(shard.get_tensor(min(sizes, key=lambda name: sizes[name])))
    return b""
