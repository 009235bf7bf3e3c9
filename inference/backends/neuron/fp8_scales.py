"""Which tensors of a checkpoint are fp8 weights, and which are the scales of these. Reads headers alone.

Scales of inputs (`input_scale`) count: they were made for 448, and NxD clips what it divided by them at 240
(`quantize_static_quant_activations`). Bounds of inputs (`input_scale_ub`) and scales of the KV cache do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inference.backends.neuron.fp8_checkpoint import E4M3, Kind, kinds_of
from inference.errors import ConfigError

SCALE_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Plan:
    """Names of tensors that are halved, and doubled: a scale may lie in another file than its weight."""

    weights: frozenset[str]
    scales: frozenset[str]


def planned(model: Path, shards: list[Path]) -> Plan:
    """What is to be done in the files of a checkpoint.

    Raises:
        ConfigError: it has no fp8 weights, or one without a scale, with two, or with one of a wrong shape or dtype.
    """
    kinds = {name: kind for shard in shards for name, kind in kinds_of(shard).items()}
    weights = [name for name, kind in kinds.items() if kind.dtype == E4M3]
    if not weights:
        raise ConfigError(f"{model} has no weights of dtype {E4M3} in safetensors files: there is nothing to rescale")
    return Plan(frozenset(weights), frozenset(scale for name in weights for scale in _scales_of(name, kinds)))


def _scales_of(weight: str, kinds: Mapping[str, Kind]) -> set[str]:
    """Of compressed-tensors, of DeepSeek and Qwen, which multiply by their `_inv` too, of NxDI; and of its input."""
    layer = weight.removesuffix(".weight")
    found = [name for name in (f"{weight}_scale", f"{weight}_scale_inv", f"{layer}.scale") if name in kinds]
    if len(found) != 1:
        raise ConfigError(f"{weight} is fp8 and has {len(found)} scales, one is needed: {', '.join(found) or 'none'}")
    if not _fits(kinds[found[0]].shape, kinds[weight].shape):
        shapes = f"{kinds[found[0]].shape}, its weight {kinds[weight].shape}"
        raise ConfigError(f"{found[0]} has shape {shapes}: neither per tensor, nor per channel, nor per block")
    scales = {*found, f"{layer}.input_scale"} & kinds.keys()
    for name in scales:
        if kinds[name].dtype not in SCALE_DTYPES:
            raise ConfigError(f"{name} has dtype {kinds[name].dtype}, known are {', '.join(SCALE_DTYPES)}")
    return scales


def _fits(scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    if scale in ((), (1,), weight[:1]):
        return True
    return len(scale) == len(weight) and all(0 < few <= many for few, many in zip(scale, weight, strict=True))
