"""Requirements on an EAGLE draft and its target, by names and shapes of their tensors; no weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PretrainedConfig

from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]

MIN_EAGLE3_LAYERS = 7
"""Fewest layers of a target of EAGLE3. The draft reads layer 1, the one before the middle and the fourth from the end;
with fewer layers, two of these are the same layer."""
EAGLE_FAMILIES = ("llama",)
"""Model types that NxDI supports as EAGLE drafts."""


def check_eagle_target(path: Path, method: str, model_config: PretrainedConfig) -> None:
    """Raise ConfigError if NxDI has no EAGLE for a target of this family or number of layers."""
    kind, num_layers = str(model_config.model_type), int(model_config.num_hidden_layers)
    if kind not in EAGLE_FAMILIES:
        raise ConfigError(f"model {path}: NxDI has {method} for {', '.join(EAGLE_FAMILIES)} alone, not {kind}")
    if method == "eagle3" and num_layers < MIN_EAGLE3_LAYERS:
        needs = f"an EAGLE3 draft reads three of a target's layers, which needs {MIN_EAGLE3_LAYERS} at least"
        raise ConfigError(f"model {path} has {num_layers} layers: {needs}")


def eagle_faults(method: str, shapes: Shapes, *, hidden_size: int, input_norm: bool) -> Iterator[str]:
    """Yield the faults for which a checkpoint cannot be a draft for `method`.

    Args:
        method: eagle or eagle3.
        shapes: shapes of the draft's tensors by name.
        hidden_size: the target's hidden size.
        input_norm: neuron_config's enable_eagle_draft_input_norm.
    """
    factor = 3 if method == "eagle3" else 2
    for name in ("embed_tokens.weight", "fc.weight", "lm_head.weight"):
        if name not in shapes:
            remedy = ": copy the target's into it" if name == "lm_head.weight" else ""
            yield f"{name} is missing{remedy}"
    if shapes.get("fc.weight") != (hidden_size, factor * hidden_size):
        wanted = [hidden_size, factor * hidden_size]
        yield f"fc.weight has shape {list(shapes.get('fc.weight', ()))}, {method} needs {wanted}"
    if not any(name.startswith("layers.") for name in shapes):
        yield "it has no layers"
    if method == "eagle3":
        yield from _eagle3_faults(shapes, hidden_size=hidden_size)
    elif "norm.weight" in shapes:
        yield "it has a final norm.weight"
    if ("layers.0.input_layernorm.weight" in shapes) != input_norm:
        yield (
            "layers.0.input_layernorm.weight and neuron_config enable_eagle_draft_input_norm go together: "
            f"the parameter is {str(input_norm).lower()}"
        )


def _eagle3_faults(shapes: Shapes, *, hidden_size: int) -> Iterator[str]:
    """Yield faults of an EAGLE3 draft, whose layer reads an embedding and a hidden state, each with its norm."""
    if {"d2t", "t2d"} & shapes.keys():
        yield "it has a reduced vocabulary (d2t, t2d), which NxDI does not support"
    for name in ("norm.weight", "layers.0.hidden_norm.weight"):
        if name not in shapes:
            yield f"{name} is missing"
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        width = shapes.get(name, (0, 0))[-1]
        if width != 2 * hidden_size:
            yield f"{name} reads {width} numbers, eagle3 needs {2 * hidden_size}"


def checkpoint_shapes(path: Path) -> Shapes | None:
    """Return a checkpoint's tensor shapes by name, without a leading "model."; None without safetensors files."""
    shapes = CheckpointFiles(path).shapes
    return {name.removeprefix("model."): shape for name, shape in shapes.items()} or None
