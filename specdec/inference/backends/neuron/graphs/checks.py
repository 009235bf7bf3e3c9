"""Checks of models that NxDI does not make: it would give wrong tokens, or crash after an hour of compiling."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

from specdec.inference.backends.architectures import rope_kind
from specdec.inference.backends.neuron.checkpoints.eagle_checkpoint import (
    check_eagle_target,
    checkpoint_shapes,
    eagle_faults,
)
from specdec.inference.backends.neuron.graphs.settings import EAGLE_METHODS, MAX_DEVICE_TOP_K
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

MIN_AUTO_BUCKET = 128
"""Least number of tokens for which NxDI by itself compiles a prompt graph; the others are the powers of two above."""
MEDUSA_PARAMETERS = ("medusa_speculation_length", "num_medusa_heads", "medusa_tree")


def check_sharding(path: Path, model_config: PretrainedConfig, tp_degree: int) -> None:
    """Raise ConfigError if a layer's width cannot be split evenly over the cores; NxDI pads heads by itself."""
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(model_config, name, tp_degree)
        if size % tp_degree:
            raise ConfigError(f"model {path}: {name} {size} is not divisible by tp_degree {tp_degree}")


def check_family(path: Path, model_config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError if NxDI would silently leave out a part of the model, such as its rotary scaling."""
    for fault in _family_faults(model_config):
        raise UnsupportedModelError(f"model {path}: {fault}")


def _family_faults(model_config: PretrainedConfig) -> Iterator[str]:
    kind = str(model_config.model_type)
    if kind == "qwen3_moe" and not getattr(model_config, "norm_topk_prob", True):
        yield "norm_topk_prob is false, but NxDI always normalizes the weights of a qwen3_moe's experts"
    if kind == "qwen3_moe" and (model_config.mlp_only_layers or model_config.decoder_sparse_step != 1):
        yield "some layers have no experts, but NxDI takes every layer of a qwen3_moe for one that has"
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(model_config, name, None) or {}
        if (rope_type := rope_kind(rope)) != "default" and kind != "llama":
            yield f"{name} is of type {rope_type}, which NxDI does not read for {kind}"
        theta = rope.get("rope_theta")
        if theta is not None and getattr(model_config, "rope_theta", theta) != theta:
            # Transformers 4, which NxDI needs, does not read what Transformers 5 writes.
            yield f"rope_theta is {model_config.rope_theta}, in {name} {theta}: write it at the top of config.json"


def check_pair(
    target: ModelConfig, draft: ModelConfig, target_words: PretrainedConfig, draft_words: PretrainedConfig
) -> None:
    """Raise ConfigError if two models cannot share a fused graph.

    Args:
        target, draft: configurations of both models as the user asked for.
        target_words, draft_words: configurations in the checkpoints of both.
    """
    if target_words.vocab_size != draft_words.vocab_size:
        raise ConfigError(
            f"draft {draft.path} has {draft_words.vocab_size} tokens, target {target.path} has "
            f"{target_words.vocab_size}: NxDI's fused graph needs one size: use --speculation_method vanilla"
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
    """Raise ConfigError if the draft's checkpoint does not fit the speculation method, or the target does not.

    Args:
        target: configuration of the target that the user asked for, with the method.
        draft: the draft's checkpoint.
        model_config: configuration in the target's checkpoint.
    """
    method = target.neuron.method
    if method in EAGLE_METHODS:
        check_eagle_target(target.path, method, model_config)
        norm = method == "eagle3" or bool(target.neuron.overrides.get("enable_eagle_draft_input_norm"))
        shapes = checkpoint_shapes(draft)
        if shapes is None:
            logger.warning("draft %s has no safetensors files: its keys are not checked for %s", draft, method)
            return
        for fault in eagle_faults(method, shapes, hidden_size=model_config.hidden_size, input_norm=norm):
            raise ConfigError(f"draft {draft} is not a checkpoint of method {method}: {fault}")
    if method == "fused" and (shapes := checkpoint_shapes(draft)) and "fc.weight" in shapes:
        raise ConfigError(f"draft {draft} has fc.weight: use --speculation_method eagle or eagle3")


def check_medusa(config: ModelConfig, model_config: PretrainedConfig) -> None:
    """Raise ConfigError if Medusa's heads or parameters are missing, or do not fit each other."""
    if model_config.model_type != "llama":
        raise ConfigError(f"model {config.path}: NxDI has Medusa heads for llama alone, not {model_config.model_type}")
    if config.num_slots != 1:
        raise ConfigError(f"speculation_method medusa serves one sequence: use --batch 1, not {config.num_slots}")
    for name in MEDUSA_PARAMETERS:
        if not config.neuron.overrides.get(name):
            raise ConfigError(f"speculation_method medusa needs neuron_config {name}")
    for fault in _tree_faults(**{name: config.neuron.overrides[name] for name in MEDUSA_PARAMETERS}):
        raise ConfigError(f"neuron_config: {fault}")
    for fault in _head_faults(config, model_config):
        raise ConfigError(f"model {config.path}: {fault}")


def _tree_faults(*, medusa_speculation_length: int, num_medusa_heads: int, medusa_tree: object) -> Iterator[str]:
    if not _is_tree(medusa_tree):
        yield "medusa_tree must be a list of paths such as [[0], [1], [0, 0]]"
        return
    choices = {tuple(path) for path in medusa_tree}  # type: ignore[attr-defined]
    for choice in sorted(choices):
        if len(choice) > num_medusa_heads:
            yield f"medusa_tree has path {list(choice)}, deeper than num_medusa_heads {num_medusa_heads}"
        if len(choice) > 1 and choice[:-1] not in choices:
            yield f"medusa_tree has path {list(choice)}, but not {list(choice[:-1])} above it"
        if max(choice) >= MAX_DEVICE_TOP_K:
            yield f"medusa_tree has path {list(choice)}: ranks are 0..{MAX_DEVICE_TOP_K - 1}"
    if medusa_speculation_length >= MIN_AUTO_BUCKET:
        yield f"medusa_speculation_length {medusa_speculation_length}: a context bucket may have as many; use less"
    if medusa_speculation_length < len(choices) + 1:
        yield (
            f"medusa_speculation_length {medusa_speculation_length} is below {len(choices) + 1}: "
            f"the {len(choices)} paths of medusa_tree and the last committed token"
        )


def _is_tree(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(path, list) and path and all(isinstance(rank, int) and rank >= 0 for rank in path) for path in value
    )


def _head_faults(config: ModelConfig, model_config: PretrainedConfig) -> Iterator[str]:
    """Yield faults of Medusa's file of heads: each head needs one residual layer and one output layer."""
    file = config.path / "medusa_heads.pt"
    if not file.is_file():
        yield "speculation_method medusa needs medusa_heads.pt beside the checkpoint"
        return
    try:
        heads = torch.load(file, map_location="meta", weights_only=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in heads.items()}
    except (OSError, RuntimeError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        yield f"medusa_heads.pt cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        return
    hidden, vocab = model_config.hidden_size, model_config.vocab_size
    for head in range(config.neuron.overrides["num_medusa_heads"]):
        layers = {"0.linear.weight": (hidden, hidden), "0.linear.bias": (hidden,), "1.weight": (vocab, hidden)}
        for layer, shape in layers.items():
            name = f"medusa_head_{head}.{layer}"
            if shapes.get(name) != shape:
                found = f"has shape {list(shapes[name])}" if name in shapes else "is missing"
                yield f"medusa_heads.pt: {name} {found}, num_medusa_heads and the model need {list(shape)}"
