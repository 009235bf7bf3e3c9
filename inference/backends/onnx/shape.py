"""Shape of a Llama-shaped decoder: the facts that its ONNX graph depends on.

Owns the reading of those facts from a Transformers model, and the layout of padded heads. Knows no graph.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from inference.backends.architectures import Config, architecture_name
from inference.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weight: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

SUPPORTED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_ROPES = ("default", "linear", "llama3", "yarn")

HEAD_MULTIPLE = 16
"""GroupQueryAttention on CPU takes head sizes that are multiples of this; other heads are padded with zeros."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and settings of a decoder.

    Attributes:
        head_dim: of the checkpoint, even; the graph computes with `head_room`, the next multiple of 16.
        score_scale: factor of the attention scores.
        rms_eps: added to mean squares before the root.
        biases: names of linear layers (as in `onnx_weights`) that have a bias.
        normalizes_heads: queries and keys are normalized head by head (Qwen3).
        inverse_frequencies: rotary frequencies in radians per position, head_dim / 2 of them.
        rotary_scale: factor of rotary sines and cosines.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    score_scale: float
    rms_eps: float
    biases: tuple[str, ...]
    normalizes_heads: bool
    inverse_frequencies: tuple[float, ...]
    rotary_scale: float

    @property
    def head_room(self) -> int:
        """Elements that a head takes in the graph and in the slots."""
        return -(-self.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_room

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_room

    def save(self, path: Path) -> None:
        """Write it as JSON; floats survive unchanged."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> DecoderShape:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text())
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return DecoderShape(**{**fields, **lists})


def require_llama_shaped(config: Config) -> None:
    """Raise UnsupportedModelError if the graph cannot express this model; needs no weights."""
    name = architecture_name(config)
    if config.model_type not in SUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"{name} is not supported by backend onnx, which runs {', '.join(SUPPORTED_TYPES)}: use backend torch"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SUPPORTED_ROPES:
        raise UnsupportedModelError(f"{name} with {kind} rotary positions is not supported by backend onnx: use torch")
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"{name} with {config.hidden_act} is not supported by backend onnx: use torch")


def shape_of(model: PreTrainedModel) -> DecoderShape:
    """Read the facts from the modules, not from the configuration, whose names differ by family and version."""
    config = model.config
    decoder: Any = model.base_model
    attention = decoder.layers[0].self_attn
    rotary = decoder.rotary_emb
    return DecoderShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(decoder.layers),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        score_scale=float(attention.scaling),
        rms_eps=float(config.rms_norm_eps),
        biases=_biases(decoder.layers[0]),
        normalizes_heads=hasattr(attention, "q_norm"),
        inverse_frequencies=tuple(rotary.inv_freq.tolist()),
        rotary_scale=float(getattr(rotary, "attention_scaling", 1.0)),
    )


def _biases(layer: Any) -> tuple[str, ...]:
    linears = {
        "qkv": layer.self_attn.q_proj,
        "out": layer.self_attn.o_proj,
        "gate": layer.mlp.gate_proj,
        "up": layer.mlp.up_proj,
        "down": layer.mlp.down_proj,
    }
    return tuple(name for name, linear in linears.items() if linear.bias is not None)
