"""Reasons for which a model cannot be served from a KV cache that is rolled back by position; all backends refuse it.

Reads Transformers' configuration of a model. What a configuration does not show is found when backend torch runs its
first token (`specdec.inference.backends.pytorch.attention.ShapeRecorder`).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # a packed model is loaded without Transformers
    from transformers import PretrainedConfig, PreTrainedModel

from specdec.inference.checkpoint_files import LENGTH_FIELDS
from specdec.inference.errors import UnsupportedModelError

DEFAULT_LENGTH = 2048
"""Default number of positions of a slot (one sequence's KV cache); a user may ask for more."""

# Prefixes of `model_type` for models that do not keep keys and values per position.
RECURRENT = (
    "mamba", "falcon_mamba", "falcon_h1", "rwkv", "jamba", "bamba", "zamba", "recurrent_gemma", "xlstm", "lfm2",
    "qwen3_next", "qwen3_5", "granitemoehybrid", "nemotron_h", "kimi_linear", "olmo_hybrid",
)  # fmt: skip
ALIBI = ("bloom", "mpt")
"""Values of `model_type` for models whose attention adds a bias by position to the scores."""

REQUIRED_ARGUMENTS = ("position_ids", "logits_to_keep")
"""Arguments of a model's forward that backend torch passes."""


class StoredConfig(SimpleNamespace):
    """Stored configuration of a text model: the result of `PretrainedConfig.to_dict`, as attributes.

    Reading a setting that the original lacks raises AttributeError, as it does on the original.
    """

    def get_text_config(self) -> StoredConfig:
        """Return this configuration itself: it is that of a text model already."""
        return self


Config: TypeAlias = "PretrainedConfig | StoredConfig"


def architecture_name(config: Config) -> str:
    """Return the name of a model's architecture, for messages that refuse it."""
    architectures = getattr(config, "architectures", None)
    return architectures[0] if architectures else type(config).__name__.removesuffix("Config")


def resolve_length(config: Config, asked: int | None) -> int:
    """Return the positions per slot: `asked`, or if that is None, the model's limit, but at most `DEFAULT_LENGTH`."""
    text_config = config.get_text_config()  # multimodal models keep the language model's settings apart
    limits = (getattr(text_config, name, None) for name in LENGTH_FIELDS)
    limit = next((limit for limit in limits if isinstance(limit, int)), None)
    return asked or (DEFAULT_LENGTH if limit is None else min(limit, DEFAULT_LENGTH))


def require_supported_config(config: Config, max_length: int, *, windows: bool = False) -> None:
    """Raise UnsupportedModelError if a KV cache of `max_length` positions per sequence cannot serve this model.

    Args:
        windows: True if the backend applies sliding windows; if not, a window below `max_length` is a reason too.
    """
    for reason in reasons(config, max_length, windows=windows):
        raise UnsupportedModelError(f"{architecture_name(config)} is not supported: {reason}")


def require_supported_model(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if the model has recurrent state, or its forward lacks an argument that we pass."""
    reasons = [f"its forward takes no {name}" for name in REQUIRED_ARGUMENTS if name not in forward_arguments(model)]
    if getattr(model, "_is_stateful", False):  # Transformers' own word for recurrent state
        reasons.append("it carries recurrent state, which cannot be rolled back by position")
    for reason in reasons:
        raise UnsupportedModelError(f"{architecture_name(model.config)} is not supported: {reason}")


def layer_windows(config: Config) -> list[int | None]:
    """Return for each layer how many last tokens, its own among them, a token attends to; None if it is all of them."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def num_kept_values(config: Config, head_multiple: int = 1) -> int:
    """Return how many numbers all layers together keep per position, as keys and values.

    Args:
        head_multiple: heads are padded to a multiple of this number of elements.
    """
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * num_heads * -(-head_dim // head_multiple) * head_multiple)


def has_experts(config: Config) -> bool:
    """Return whether the model is a mixture of experts, each of which computes only some of a pass's tokens."""
    fields = vars(config.get_text_config())
    return any("experts" in name and isinstance(value, int) and value > 1 for name, value in fields.items())


def rope_settings(config: Config) -> Iterator[dict[str, Any]]:
    """Yield all rotary settings, nested ones too: `rope_scaling` in Transformers 4, `rope_parameters` in 5.

    An empty dictionary stands for the one that the configuration lacks.
    """
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None) or {}
        yield rope
        yield from (nested for nested in rope.values() if isinstance(nested, dict))


def rope_kind(rope: dict[str, Any]) -> str:
    """Return the type of rotary positions that the settings name, such as "default" or "yarn"."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def forward_arguments(model: PreTrainedModel) -> Collection[str]:
    """Return the names of the arguments of the model's forward; its `**kwargs` may silently ignore other names."""
    return inspect.signature(model.forward).parameters


def reasons(config: Config, max_length: int, *, windows: bool) -> Iterator[str]:
    """Yield the reasons for which `require_supported_config` refuses a model, each as the end of a message.

    Args:
        max_length: positions of a sequence in the KV cache.
        windows: True if the backend applies sliding windows; if not, a window below `max_length` is a reason too.
    """
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    config = config.get_text_config()
    model_type = str(config.model_type)
    if model_type.startswith(RECURRENT):
        yield "it carries recurrent state, which cannot be rolled back by position"
    if model_type in ALIBI or getattr(config, "alibi", False):
        yield "ALiBi position bias is not plain causal attention"
    kinds = set(getattr(config, "layer_types", None) or ())
    for kind in sorted(kinds - {"full_attention", "sliding_attention"}):
        yield f"its layers of type {kind} keep other state than keys and values"
    window = min((each for each in layer_windows(config) if each is not None), default=max_length)
    if window < max_length and not windows:
        yield f"its sliding window of {window} is below the sequence length of {max_length}"
    yield from _rope_reasons(config, max_length)


def _rope_reasons(config: Config, max_length: int) -> Iterator[str]:
    for rope in rope_settings(config):
        kind = rope_kind(rope)
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind == "longrope" and original is not None:
            if max_length > original:  # up to there one set of frequencies is used throughout
                yield f"its longrope rotary frequencies change with the length seen, beyond {original} positions"
        elif kind in ("longrope", "su") or "dynamic" in kind:
            yield f"its {kind} rotary frequencies change with the length seen"
