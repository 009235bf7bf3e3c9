"""Shape of a decoder: the sizes and settings that its ONNX graph depends on, and the model families that are supported.

Reads the shape from a Transformers model, and says how heads are padded. Knows no graph.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from specdec.inference.backends.architectures import Config, architecture_name, layer_windows, rope_kind, rope_settings
from specdec.inference.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weight: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
Rotary: TypeAlias = "tuple[tuple[float, ...], float]"
"""Rotary positions: frequencies in radians per position, and the factor of sines and cosines."""

SUPPORTED_ROPES = ("default", "linear", "llama3", "yarn", "longrope")
"""Types of rotary positions whose frequencies are the same at every length."""
ACTIVATIONS: dict[str, tuple[str, dict[str, float]]] = {
    "silu": ("QuickGelu", {"alpha": 1.0}),  # x * sigmoid(1 * x), as one operator
    "gelu_pytorch_tanh": ("FastGelu", {}),
}
"""ONNX Runtime's operator and its attributes for each activation, by Transformers' name."""


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of a model family from Llama that its modules do not show.

    `shape_of` and `decoder_weights` find all other differences in the modules.

    Attributes:
        activation: name of the configuration's field that names the activation of the gate.
        norm_offset: number that is added to the weights of norms.
    """

    activation: str = "hidden_act"
    norm_offset: float = 0.0


FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite", "olmo2", "olmo3"), Family()),
    "gemma": Family(norm_offset=1.0),
    **dict.fromkeys(("gemma2", "gemma3_text"), Family("hidden_activation", norm_offset=1.0)),
}

PROBE_WINDOW = 3
"""Sliding window in tokens for the test at loading, whose few tokens would all lie within a model's own window."""

HEAD_MULTIPLE = 16
"""GroupQueryAttention on CPU takes head sizes that are multiples of this; other heads are padded with zeros."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and settings of a decoder.

    Attributes:
        head_dim: elements of a head in the checkpoint, even; the graph has `head_room`, the next multiple of 16.
        score_scale: factor of the attention scores.
        rms_eps: epsilon of RMS norms, which is added to mean squares before the root.
        biases: names of linear layers (as in `weights.py`) that have a bias.
        head_norms: "head": queries and keys are normalized head by head (Qwen3); "all": over all heads at once (OLMo2);
            empty: they are not.
        input_norms: attention and gates read normalized inputs.
        output_norms: outputs of attention and gates are normalized before they are added (Gemma2, OLMo2).
        activation: activation of the gate, one of `ACTIVATIONS`.
        score_cap: limit to which a tanh bends the attention scores; 0: they have none.
        logit_cap: the same for the logits.
        windows: by layer, the number of last positions that a token sees, its own among them; 0 is all.
        rotaries: rotary positions of the layers, without duplicates.
        layer_rotaries: index into `rotaries` of each layer.
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
    head_norms: Literal["", "head", "all"]
    input_norms: bool
    output_norms: bool
    activation: str
    score_cap: float
    logit_cap: float
    windows: tuple[int, ...]
    rotaries: tuple[Rotary, ...]
    layer_rotaries: tuple[int, ...]

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

    @property
    def rotary_dim(self) -> int:
        """Number of a head's elements, counted from its first, that rotary positions rotate."""
        return 2 * len(self.rotaries[0][0])

    def narrowed(self) -> DecoderShape:
        """Return the shape with sliding windows so narrow that the tokens of the test at loading extend beyond them."""
        return replace(self, windows=tuple(min(window, PROBE_WINDOW) for window in self.windows))

    def save(self, path: Path) -> None:
        """Write the shape to a JSON file; floats are read back exactly."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> DecoderShape:
        """Return the shape in a file that `save` wrote."""
        fields = json.loads(path.read_text())
        return DecoderShape(**{name: _tuples(value) for name, value in fields.items()})


def require_llama_shaped(config: Config) -> None:
    """Raise UnsupportedModelError if the ONNX graph cannot express the model of a text model's configuration."""
    name = architecture_name(config)
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{name} is not supported by backend onnx, which runs {', '.join(FAMILIES)}: use backend torch"
        )
    for kind in map(rope_kind, rope_settings(config)):
        if kind not in SUPPORTED_ROPES:
            raise UnsupportedModelError(
                f"{name} with {kind} rotary positions is not supported by backend onnx: use torch"
            )
    activation = _activation(config)
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(f"{name} with {activation} is not supported by backend onnx: use torch")


def shape_of(model: PreTrainedModel) -> DecoderShape:
    """Return a model's shape, read from its modules, since names in configurations differ by family and version."""
    config = model.config.get_text_config()  # multimodal models keep the language model apart
    decoder: Any = model.get_decoder()
    layer = decoder.layers[0]
    attention = layer.self_attn
    rotaries = [_rotary(decoder, index) for index in range(len(decoder.layers))]
    distinct = tuple(dict.fromkeys(rotaries))
    return DecoderShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(decoder.layers),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        score_scale=float(attention.scaling),
        rms_eps=float(config.rms_norm_eps),
        biases=_biases(layer),
        head_norms=_head_norms(attention),
        input_norms=hasattr(layer, "input_layernorm"),
        output_norms=hasattr(layer, "post_feedforward_layernorm"),
        activation=_activation(config),
        score_cap=float(getattr(attention, "attn_logit_softcapping", None) or 0),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0),
        windows=tuple(window or 0 for window in layer_windows(config)),
        rotaries=distinct,
        layer_rotaries=tuple(map(distinct.index, rotaries)),
    )


def _activation(config: Config) -> str:
    return str(getattr(config, FAMILIES[config.model_type].activation))


def _head_norms(attention: Any) -> Literal["", "head", "all"]:
    if not hasattr(attention, "q_norm"):
        return ""
    return "head" if len(attention.q_norm.weight) == attention.head_dim else "all"


def _rotary(decoder: Any, layer: int) -> Rotary:
    """Return a layer's rotary positions, with frequencies 0 if it uses none; some families keep them by layer type.

    Args:
        decoder: Transformers' module of the decoder.
        layer: number of the layer.
    """
    rotary = decoder.rotary_emb
    kind = "" if hasattr(rotary, "inv_freq") else f"{decoder.config.layer_types[layer]}_"
    frequencies = getattr(rotary, f"{kind}inv_freq")
    if not getattr(decoder.layers[layer].self_attn, "use_rope", True):
        return (0.0,) * len(frequencies), 1.0
    return tuple(frequencies.tolist()), float(getattr(rotary, f"{kind}attention_scaling", 1.0))


def _biases(layer: Any) -> tuple[str, ...]:
    """Return which of "qkv", "out", "gate", "up" and "down" have biases in a layer, a module of Transformers.

    The joined layers of Phi-3 have none.
    """
    places = {"qkv": "self_attn.q_proj", "out": "self_attn.o_proj"}
    places |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    parameters = dict(layer.named_parameters())
    return tuple(name for name, place in places.items() if f"{place}.bias" in parameters)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
