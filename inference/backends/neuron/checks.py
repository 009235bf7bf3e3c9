"""What NxDI does not check of checkpoints, and would answer with garbage or a crash after an hour of compiling.

Owns the reading of a checkpoint's names and shapes; reads no weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from transformers import PretrainedConfig

from inference.config import ModelConfig
from inference.errors import ConfigError

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]


def check_sharding(path: Path, model_config: PretrainedConfig, tp_degree: int) -> None:
    """Raise ConfigError if a width cannot be split evenly over the cores; heads NxDI pads by itself."""
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(model_config, name, tp_degree)
        if size % tp_degree:
            raise ConfigError(f"model {path}: {name} {size} is not divisible by tp_degree {tp_degree}")


def check_pair(
    target: ModelConfig, draft: ModelConfig, target_words: PretrainedConfig, draft_words: PretrainedConfig
) -> None:
    """Raise ConfigError if two models cannot share a fused graph.

    Args:
        target, draft: what was asked for.
        target_words, draft_words: their checkpoints' configurations.
    """
    if target_words.vocab_size != draft_words.vocab_size:
        raise ConfigError(
            f"draft {draft.path} has {draft_words.vocab_size} tokens, target {target.path} has "
            f"{target_words.vocab_size}: a fused graph needs one vocabulary"
        )
    if target.neuron.tp_degree % draft.neuron.tp_degree:
        raise ConfigError(
            f"the draft's tp_degree {draft.neuron.tp_degree} does not divide the target's {target.neuron.tp_degree}"
        )
    if target.dtype != draft.dtype and target.neuron.overrides.get("cast_type") != "as-declared":
        raise ConfigError(
            f"draft dtype {draft.dtype} differs from target dtype {target.dtype}: "
            "make them equal, or set neuron_config cast_type as-declared"
        )


def check_method(target: ModelConfig, draft: Path, model_config: PretrainedConfig) -> None:
    """Raise ConfigError if the draft's checkpoint is not one of the method's."""
    method = target.neuron.method
    if method in ("eagle", "eagle3"):
        norm = bool(target.neuron.overrides.get("enable_eagle_draft_input_norm"))
        shapes = checkpoint_shapes(draft)
        if shapes is None:
            logger.warning("draft %s has no safetensors files: its keys are not checked for %s", draft, method)
            return
        for fault in _eagle_faults(method, shapes, hidden_size=model_config.hidden_size, input_norm=norm):
            raise ConfigError(f"draft {draft} is no {method} checkpoint: {fault}")
    if method == "fused" and (shapes := checkpoint_shapes(draft)) and "fc.weight" in shapes:
        raise ConfigError(f"draft {draft} has fc.weight: use --speculation_method eagle or eagle3")


def _eagle_faults(method: str, shapes: Shapes, *, hidden_size: int, input_norm: bool) -> Iterator[str]:
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
    if method == "eagle3" and {"d2t", "t2d"} & shapes.keys():
        yield "it has a reduced vocabulary (d2t, t2d), which NxDI does not support"
    if method == "eagle":
        yield from _eagle_norm_faults(shapes, input_norm=input_norm)


def _eagle_norm_faults(shapes: Shapes, *, input_norm: bool) -> Iterator[str]:
    if "norm.weight" in shapes:
        yield "it has a final norm.weight"
    if ("layers.0.input_layernorm.weight" in shapes) != input_norm:
        yield (
            "layers.0.input_layernorm.weight and neuron_config enable_eagle_draft_input_norm go together: "
            f"the parameter is {str(input_norm).lower()}"
        )


def check_medusa(config: ModelConfig) -> None:
    """Raise ConfigError if Medusa's heads or parameters are missing."""
    heads = config.path / "medusa_heads.pt"
    if not heads.is_file():
        raise ConfigError(f"model {config.path}: speculation_method medusa needs medusa_heads.pt beside the checkpoint")
    for name in ("medusa_speculation_length", "num_medusa_heads", "medusa_tree"):
        if not config.neuron.overrides.get(name):
            raise ConfigError(f"speculation_method medusa needs neuron_config {name}")
    if config.num_slots != 1:
        raise ConfigError(f"speculation_method medusa serves one sequence: use --batch 1, not {config.num_slots}")


def checkpoint_shapes(path: Path) -> Shapes | None:
    """Shapes of a checkpoint's tensors by name, without a leading "model."; None if it has no safetensors files."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        return None
    shapes: Shapes = {}
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                shapes[name.removeprefix("model.")] = tuple(entry["shape"])
    return shapes


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    """A safetensors file begins with the length of a JSON header, eight bytes little-endian, and the header."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, dict[str, list[int]]] = json.loads(stream.read(length))
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{file} is no safetensors file: {error}") from error
    return header
