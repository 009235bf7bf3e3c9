"""Names of a checkpoint's fp8 weights and their scales, and the check that the weights are in Neuron's format.

Reads headers, and one weight tensor at most. Scales of inputs (`input_scale`) are doubled too: they were made for a
largest value of 448, and NxD clips the inputs that it divided by them at 240 (`quantize_static_quant_activations`).
Upper limits of inputs (`input_scale_ub`) and scales of the KV cache stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from specdec.inference.backends.neuron.checkpoints.fp8 import is_beyond_neuron
from specdec.inference.backends.neuron.checkpoints.shards import bytes_of, open_shard, read_json
from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.errors import ConfigError

logger = logging.getLogger(__name__)

E4M3 = "F8_E4M3"
SCALE_DTYPES = ("F64", "F32", "F16", "BF16")
MARK = "rescaled_to_neuron_fp8"
"""Key of config.json that marks a rescaled checkpoint; in `quantization_config`, Transformers might refuse the key."""


def check_rescaled(folder: Path) -> None:
    """Refuse a checkpoint with E4M3 weights above 240, which Neuron would read as infinite or NaN.

    A checkpoint with `MARK` in its config.json was rescaled, and passes. Of any other, only the smallest E4M3 tensor is
    read: in a checkpoint that was not rescaled its largest value is 448, since quantizing chooses the scale of each
    tensor, row or block for that. If nothing is above 240, a warning says that the mark is missing. A folder that does
    not exist, or has no E4M3 weights, passes.

    Raises:
        ConfigError: the tensor has a value above 240, so the checkpoint was not rescaled.
    """
    if not folder.is_dir() or ((folder / "config.json").exists() and MARK in read_json(folder / "config.json")):
        return
    sample = _sample(folder)
    if is_beyond_neuron(sample):
        remedy = f"specdec rescale_fp8 --model {folder} --output {folder}-rescaled"
        raise ConfigError(f"{folder} has fp8 weights above 240, where Neuron's end: rescale it first: {remedy}")
    if sample:
        logger.warning(
            "%s is not marked as rescaled to Neuron's fp8, but is used: no value of a sample is above 240", folder
        )


def _sample(folder: Path) -> bytes:
    """Return the bytes of the smallest E4M3 tensor; empty if there is none."""
    files = CheckpointFiles(folder)
    sizes = {name: prod(entry["shape"]) for name, entry in files.tensors.items() if entry["dtype"] == E4M3}
    smallest = min(sizes, key=lambda name: sizes[name], default=None)
    for file in files.weights:
        with open_shard(file) as shard:
            if smallest in shard.keys():  # noqa: SIM118
                return bytes_of(shard.get_tensor(smallest))
    return b""


@dataclass(frozen=True, slots=True)
class Plan:
    """Names of a checkpoint's tensors to change: of the weights to halve, and of the scales to double."""

    weights: frozenset[str]
    scales: frozenset[str]


def planned(model: Path) -> Plan:
    """Return which tensors of a checkpoint are to be halved (its fp8 weights) and doubled (their scales).

    Raises:
        ConfigError: the files have no fp8 weights, or a weight has no scale, two scales, or a scale of a wrong shape
            or dtype.
    """
    tensors = CheckpointFiles(model).tensors
    weights = [name for name, entry in tensors.items() if entry["dtype"] == E4M3]
    if not weights:
        raise ConfigError(f"{model} has no weights of dtype {E4M3} in safetensors files: there is nothing to rescale")
    return Plan(frozenset(weights), frozenset(scale for name in weights for scale in _scales_of(name, tensors)))


def _scales_of(weight: str, tensors: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the names of an fp8 weight's scale and, if there is one, of its input's scale.

    The names are those that compressed-tensors, DeepSeek and Qwen, and NxDI give to scales. DeepSeek's and Qwen's end
    with `_inv`, but they multiply the weight, as the others do.

    Raises:
        ConfigError: the weight has no scale or several, or a scale has a shape or dtype that does not fit.
    """
    layer = weight.removesuffix(".weight")
    found = [name for name in (f"{weight}_scale", f"{weight}_scale_inv", f"{layer}.scale") if name in tensors]
    if len(found) != 1:
        raise ConfigError(f"{weight} is fp8 and has {len(found)} scales, one is needed: {', '.join(found) or 'none'}")
    scale, shape = (tuple(tensors[name]["shape"]) for name in (found[0], weight))
    if not _fits(scale, shape):
        shapes = f"{scale}, its weight {shape}"
        raise ConfigError(f"{found[0]} has shape {shapes}: neither per tensor, nor per channel, nor per block")
    scales = {*found, f"{layer}.input_scale"} & tensors.keys()
    for name in scales:
        if (dtype := tensors[name]["dtype"]) not in SCALE_DTYPES:
            raise ConfigError(f"{name} has dtype {dtype}, known are {', '.join(SCALE_DTYPES)}")
    return scales


def _fits(scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    if scale in ((), (1,), weight[:1]):
        return True
    return len(scale) == len(weight) and all(0 < few <= many for few, many in zip(scale, weight, strict=True))
