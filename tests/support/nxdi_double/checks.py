"""Configurations and checkpoints that NxDI refuses or gets wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.nxdi_double.config import InferenceConfig, NeuronConfig


def check_application(config: InferenceConfig) -> None:
    """Raise where NxDI raises when it makes an application."""
    neuron, pair = config.neuron_config, config.fused_spec_config
    if neuron.enable_fused_speculation and neuron.on_device_sampling_config is None:
        raise ValueError("fused speculation needs on-device sampling")
    if neuron.enable_fused_speculation and pair is None:
        raise ValueError("no fused_spec_config")
    if pair is not None:
        _check_draft(neuron, pair.draft_config.neuron_config)


def _check_draft(config: NeuronConfig, draft: NeuronConfig) -> None:
    width = config.speculation_length if config.enable_eagle_speculation else 0
    if draft.speculation_length != width or draft.is_eagle_draft != config.enable_eagle_speculation:
        raise ValueError("the draft's configuration is not a draft's")
    if config.tp_degree % draft.tp_degree:
        raise ValueError("the draft's cores do not divide the target's")


def check_compilation(config: InferenceConfig) -> None:
    """Raise where NxDI raises when it traces the graphs and shards the weights."""
    neuron, pair = config.neuron_config, config.fused_spec_config
    if neuron.quantized and neuron.quantization_dtype.startswith("f8") and _is_per_tensor(neuron):
        raise RuntimeError("Cannot get channel axis for the scale: 0.005")
    if pair is None:
        return
    if neuron.quantized and not neuron.draft_model_modules_to_not_convert:
        raise KeyError("layers.0.self_attn.q_proj.scale")
    tree = neuron.token_tree_config
    if tree and neuron.speculation_length != len({*tree, *(node for nodes in tree.values() for node in nodes)}):
        raise RuntimeError("the tree does not have as many nodes as a pass has tokens")
    if neuron.enable_eagle_speculation:
        _check_eagle(config, Path(pair.draft_model_path))


def _check_eagle(config: InferenceConfig, draft: Path) -> None:
    neuron, hidden = config.neuron_config, config.hidden_size  # type: ignore[attr-defined]
    factor = 3 if neuron.is_eagle3 else 2
    wanted: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, factor * hidden)}
    if neuron.is_eagle3:
        wanted["layers.0.self_attn.q_proj.weight"] = (hidden, 2 * hidden)
        wanted["layers.0.hidden_norm.weight"] = wanted["norm.weight"] = (hidden,)
    shapes = _shapes(draft)
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            raise RuntimeError(f"expected shape {shape} for {name} but found {shapes.get(name)}")
    scattered = neuron.sequence_parallel_enabled
    if neuron.is_eagle3 and not scattered:
        raise RuntimeError("EAGLE3 fails without sequence parallel")
    if scattered and neuron.tp_degree > 1 and neuron.cc_pipeline_tiling_factor != 1:
        raise RuntimeError("Sizes of tensors must match except in dimension 2. Expected size 136 but got size 68")


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with (path / "model.safetensors").open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {
        name.removeprefix("model."): tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    }


def check_quantizing(config: NeuronConfig) -> None:
    """Raise where NxDI raises when it writes a quantized checkpoint."""
    if config.quantization_type not in ("per_tensor_symmetric", "per_channel_symmetric"):
        raise RuntimeError(f"{config.quantization_type} not supported")


def quantized_logits(config: NeuronConfig, logits: torch.Tensor) -> torch.Tensor:
    """Return wrong logits if layers that should not be converted were quantized too, as in NxDI."""
    wrong = config.quantized and _is_per_tensor(config) and config.modules_to_not_convert
    return logits * 100 if wrong else logits


def _is_per_tensor(config: Any) -> bool:
    return bool(config.quantization_type == "per_tensor_symmetric")


def check_on_cpu(config: NeuronConfig, bucket: int, buckets: list[int]) -> None:
    """Refuse all but the widest of several buckets: CPU mode has one mask length for all prompt graphs."""
    if config.on_cpu and len(buckets) > 1 and bucket != buckets[-1]:
        raise RuntimeError(f"The size of tensor a ({buckets[-1]}) must match the size of tensor b ({bucket})")
