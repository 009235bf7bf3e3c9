"""Architectures whose state is more than keys and values per position are refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.inference.backends.architectures import require_supported_config, resolve_length
from specdec.inference.backends.pytorch.attention import ShapeRecorder
from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.errors import UnsupportedModelError
from tests.support.models import tiny_model

LENGTH = 32

WINDOWED = {"sliding_window": LENGTH - 1, "use_sliding_window": True}

# model_type, fields of its configuration, name and reason of the refusal
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("mamba", {}, "Mamba", "recurrent state"),
    ("mamba2", {}, "Mamba2", "recurrent state"),
    ("falcon_mamba", {}, "FalconMamba", "recurrent state"),
    ("rwkv", {}, "Rwkv", "recurrent state"),
    ("jamba", {}, "Jamba", "recurrent state"),
    ("recurrent_gemma", {}, "RecurrentGemma", "recurrent state"),
    ("qwen3_next", {}, "Qwen3Next", "recurrent state"),
    ("lfm2", {}, "Lfm2", "recurrent state"),
    ("t5", {}, "T5", "encoder-decoder"),
    ("bloom", {}, "Bloom", "ALiBi"),
    ("mpt", {}, "Mpt", "ALiBi"),
    ("falcon", {"alibi": True}, "Falcon", "ALiBi"),
    ("mistral", {"sliding_window": LENGTH - 1}, "Mistral", "sliding window of 31 is below the sequence length of 32"),
    ("qwen2", {**WINDOWED, "max_window_layers": 0}, "Qwen2", "sliding window of 31"),
    ("gemma2", {"sliding_window": 16}, "Gemma2", "sliding window of 16"),
    ("gemma3_text", {"sliding_window": 16}, "Gemma3Text", "sliding window of 16"),
    ("llama4_text", {}, "Llama4Text", "layers of type chunked_attention"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "Llama", "dynamic rotary frequencies"),
]


@pytest.mark.parametrize(("model_type", "fields", "name", "reason"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_by_configuration(model_type: str, fields: dict[str, Any], name: str, reason: str) -> None:
    config = AutoConfig.for_model(model_type, **fields)
    with pytest.raises(UnsupportedModelError, match=f"{name} is not supported: .*{reason}"):
        require_supported_config(config, LENGTH)


def phi3_with_long_rope() -> Any:
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    return AutoConfig.for_model(
        "phi3",
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=None,
        max_position_embeddings=128,
        original_max_position_embeddings=LENGTH,
        rope_scaling=rope,
    )


def test_long_rope_is_refused_where_it_changes_frequencies() -> None:
    require_supported_config(phi3_with_long_rope(), LENGTH)
    with pytest.raises(UnsupportedModelError, match="Phi3 is not supported: its longrope rotary frequencies"):
        require_supported_config(phi3_with_long_rope(), LENGTH + 1)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
        ("mistral", {"sliding_window": LENGTH}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}),
        ("falcon", {"alibi": False}),
    ],
)
def test_accepted_by_configuration(model_type: str, fields: dict[str, Any]) -> None:
    require_supported_config(AutoConfig.for_model(model_type, **fields), LENGTH)


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_windows_are_accepted_where_a_backend_applies_them(model_type: str) -> None:
    require_supported_config(AutoConfig.for_model(model_type, sliding_window=16), LENGTH, windows=True)


def test_a_window_that_only_the_configuration_has_is_refused() -> None:
    """A model is refused if its configuration has a sliding window that its layers do not pass to attention.

    Qwen2-MoE is one: it puts the window into masks that it makes itself, which the attention of this backend replaces.
    """
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    windows = {"use_sliding_window": True, "sliding_window": LENGTH - 1, "max_window_layers": 2}
    model = small_model("qwen2_moe", **experts, **windows, shared_expert_intermediate_size=8)
    message = r"Qwen2Moe.* layer 0 asks for a sliding window of None, and its configuration for 31"
    with pytest.raises(UnsupportedModelError, match=message):
        TorchBackend(model, num_slots=1, max_length=LENGTH)


def small_model(model_type: str, **fields: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    ids = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **{**sizes, **ids, "head_dim": 8, "intermediate_size": 16, **fields})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


class Layer(torch.nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


def test_a_layer_that_attends_more_than_once_is_refused() -> None:
    recorder, layer = ShapeRecorder("Twice", [None], LENGTH), Layer(0)
    ones = torch.ones(1, 2, 1, 8)
    recorder.attend(layer, ones, ones, ones, scaling=None, options={})
    with pytest.raises(UnsupportedModelError, match="Twice is not supported: its layer 0 asks for attention more than"):
        recorder.attend(layer, ones, ones, ones, scaling=None, options={})


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("attention_mask", torch.zeros(1, 1, 1, 1), "a mask of its own"),
        ("position_bias", torch.zeros(1), "position bias"),
        ("sliding_window", LENGTH - 1, "a sliding window of 31, and its configuration for None"),
    ],
)
def test_options_of_layers_that_change_scores_are_refused(option: str, value: object, reason: str) -> None:
    recorder, layer = ShapeRecorder("Wants", [None, None], LENGTH), Layer(1)
    ones = torch.ones(1, 2, 1, 8)
    recorder.attend(layer, ones, ones, ones, scaling=None, options={option: None, "sliding_window": LENGTH})
    recorder.shapes.clear()
    with pytest.raises(UnsupportedModelError, match=f"Wants is not supported: its layer 1 asks for {reason}"):
        recorder.attend(layer, ones, ones, ones, scaling=None, options={option: value})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("_is_stateful", True, "it carries recurrent state"),
        ("set_attn_implementation", lambda *_: None, "its attention cannot be replaced"),
        ("forward", lambda self, input_ids, logits_to_keep=0, **_: None, "its forward takes no position_ids"),
    ],
)
def test_models_of_another_kind_are_refused(
    name: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(type(model), name, value)
    with pytest.raises(UnsupportedModelError, match=f"Llama.* is not supported: {reason}"):
        TorchBackend(model, num_slots=1, max_length=LENGTH)


def test_a_model_that_cannot_run_one_token_is_refused() -> None:
    def fail(*_: object) -> None:
        raise KeyError("no mask to index")

    model = tiny_model("llama")
    model.register_forward_pre_hook(fail)
    with pytest.raises(UnsupportedModelError, match=r"Llama.* is not supported: .*fails.*no mask to index"):
        TorchBackend(model, num_slots=1, max_length=LENGTH)


@pytest.mark.parametrize(
    ("model_type", "fields", "limit"),
    [
        ("llama", {"max_position_embeddings": 512}, 512),
        ("llama", {"max_position_embeddings": 8192}, 8192),
        ("gpt2", {"n_positions": 256}, 256),
    ],
)
def test_length_is_limited_by_the_model(model_type: str, fields: dict[str, Any], limit: int) -> None:
    config = AutoConfig.for_model(model_type, **fields)
    assert resolve_length(config, None) == min(limit, 2048)
    assert resolve_length(config, limit) == limit
