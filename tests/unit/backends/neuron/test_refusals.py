"""Impossible models, pairs and settings are refused before anything is compiled; the error names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specdec.inference.backends.neuron.backend import load_neuron_backend
from specdec.inference.backends.registry import load_decoder
from specdec.inference.errors import ConfigError
from specdec.inference.speculation.slot_decoder import decide
from tests.conftest import ModelDirectories
from tests.support.models import save_tiny_model
from tests.support.neuron.checkpoints import save_eagle_draft
from tests.support.neuron.slot_models import checkpoint, neuron_config
from tests.unit.backends.neuron.test_fused import DO_SAMPLE, K, pair

Options = dict[str, Any]


def given(**overrides: Any) -> Options:
    """Return neuron options that set these fields of NxDI's NeuronConfig."""
    return {"overrides": overrides}


def quantized(**more: Any) -> Options:
    """Return neuron options of a model with weights quantized per tensor, NxDI's default, and fields `more`."""
    return given(quantized=True, quantized_checkpoints_path="there", **more)


def per_channel(**more: Any) -> Options:
    return quantized(quantization_type="per_channel_symmetric", **more)


WHOLE_NAME = "with fused_qkv: NxDI needs layers.0.self_attn by this whole name"
SLOTS: list[tuple[Options, str]] = [
    (given(sequence_paralel_enabled=True), "no parameter sequence_paralel_enabled: did you mean"),
    (given(trace_tokengen_model=True), "no parameter trace_tokengen_model"),
    (given(tp_degree=4), "tp_degree 4 contradicts 1, which is set by --tp_degree"),
    (given(n_positions=4), "which is set by --sequence_length"),
    (given(enable_fused_speculation=True), "contradicts False, which is set by --speculation_method"),
    (given(is_medusa=True), "contradicts False, which is set by --speculation_method"),
    (given(output_logits=True), "output_logits True contradicts False, which is set by --device_sampling"),
    (given(on_cpu=True), "on_cpu: NxDI's CPU mode does not speculate: use --gamma 0"),
    ({"gamma": 0, "tp_degree": 2, **given(on_cpu=True)}, "on_cpu: tp_degree 2 needs as many processes"),
    (
        {"tp_degree": 8, "length": 32, **given(sequence_parallel_enabled=True)},
        "sequence_parallel_enabled: tp_degree 8 does not divide prompts of 36 tokens",
    ),
    (
        {"tp_degree": 8, **given(sequence_parallel_enabled=True, context_encoding_buckets=[16, 20])},
        "tp_degree 8 does not divide prompts of 20 tokens",
    ),
    (given(apply_seq_ids_mask=False), "live slots would be overwritten"),
    (given(on_device_sampling_config={"top_k": 5}), "on_device_sampling_config does not go with"),
    (given(async_mode=True), "async_mode does not go with this server"),
    (given(is_prefix_caching=True), "is_prefix_caching does not go with"),
    (given(spec_batch_size=1), "exactly one of token_generation_buckets"),
    (given(context_encoding_buckets=[4, 16]), "a context bucket of 4 tokens"),
    (given(context_encoding_buckets=[99]), "^neuron_config: Context bucket 99 should be <= 28$"),
    (given(kv_cache_quant=True), "kv_cache_quant alone has no effect: add kv_quant_config"),
    (given(quantized=True), "needs quantized_checkpoints_path"),
    (given(quantized=True, quantization_dtype="int4"), "quantization_dtype int4 is none of int8"),
    (quantized(modules_to_not_convert=["lm_head"]), "modules_to_not_convert: .*set quantization_type per_channel"),
    (quantized(quantization_dtype="f8e4m3"), "quantization_dtype f8e4m3: .*set quantization_type per_channel"),
    # "self_attn" failed after everything was compiled: NxDI's reader of checkpoints looks for whole names.
    (per_channel(fused_qkv=True, modules_to_not_convert=["self_attn"]), f"modules_to_not_convert {WHOLE_NAME}"),
    (per_channel(fused_qkv=True, modules_to_not_convert=["layers"]), f"modules_to_not_convert {WHOLE_NAME}"),
    (
        per_channel(fused_qkv=True, modules_to_not_convert=["layers.1.self_attn", "layers.0.self"]),
        f"modules_to_not_convert {WHOLE_NAME}",
    ),
    ({"device_sampling": True}, "device_sampling: a draft, or a target that verifies one, needs"),
    ({"tp_degree": 3}, "hidden_size 32 is not divisible by tp_degree 3"),
    ({"method": "eagle"}, "speculation_method eagle needs a target and a draft model"),
]


@pytest.mark.parametrize(("options", "message"), SLOTS)
def test_unusable_settings_of_one_model_are_refused(options: Options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_neuron_backend(neuron_config(checkpoint("llama"), **options))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8"}, "dtype int8 is backend onnx's: here use neuron_config"),
        ({"sequence_length": 5}, "sequence_length 5 leaves no room beside a verification pass of 4 tokens"),
    ],
)
def test_unusable_dtypes_and_lengths_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_neuron_backend(replace(neuron_config(checkpoint("llama")), **fields))


def test_an_old_nxdi_names_the_image_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "0.6.10598+1a2b")
    with pytest.raises(ConfigError, match=r"needs NxD Inference 0.7 or newer.* has 0.6.*sdk2.29.1"):
        load_neuron_backend(neuron_config(checkpoint("llama")))


def sampling(method: str, **config: bool) -> Options:
    return {"method": method, **given(on_device_sampling_config=config)}


TREE = {"0": ["1", "2"], "1": ["3"], "2": ["4"]}
PAIRS: list[tuple[Options, str]] = [
    (sampling("fused", **DO_SAMPLE), "do_sample: speculation_method fused is greedy on the device"),
    (sampling("fused", dynamic=True), "samples the first token of a prompt alone"),
    (sampling("eagle", do_sample=True), "do_sample needs dynamic"),
    (sampling("eagle", **DO_SAMPLE, deterministic=True), "the law would not be the target's"),
    (given(output_logits=False), "output_logits False contradicts True, which is set by --device_sampling"),
    ({"method": "vanilla", "device_sampling": True}, "device_sampling does not go with speculation_method vanilla"),
    (given(speculation_length=9), "speculation_length 9 contradicts 4, which is set by --gamma"),
    (given(context_encoding_buckets=[K, 32]), "a context bucket of 4 tokens"),
    ({"width": 5, **given(token_tree_config=TREE)}, "token_tree_config goes with eagle, not with fused"),
    (
        {"method": "eagle", **given(token_tree_config=TREE)},
        r"token_tree_config has 5 nodes, .* must be as many, not 4",
    ),
    (per_channel(), "pair needs draft_model_modules_to_not_convert"),
    (
        per_channel(fused_qkv=True, draft_model_modules_to_not_convert=["lm_head", "embed_tokens", "layers"]),
        f"draft_model_modules_to_not_convert {WHOLE_NAME}",
    ),
    ({"method": "eagle"}, r"is not a checkpoint of method eagle: fc.weight is missing"),
]


@pytest.mark.parametrize(("options", "message"), PAIRS)
def test_unusable_settings_of_pairs_are_refused(models: ModelDirectories, options: Options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_decoder(*pair(models.target, models.related, **options), decide)


def test_a_pair_refuses_another_device(models: ModelDirectories) -> None:
    """A target and draft on backend neuron refuse --device, as a single model does.

    Regression: --device cuda beside --backend neuron was refused for one model, and ignored for a pair.
    """
    target, draft = pair(models.target, models.related)
    with pytest.raises(ConfigError, match="device cuda: backend neuron takes the cores of NEURON_RT_VISIBLE_CORES"):
        load_decoder(replace(target, device="cuda"), draft, decide)


Saved = Callable[[Path], Path]


def tiny(family: str = "llama", **fields: Any) -> Saved:
    return lambda folder: save_tiny_model(folder, family, **fields)


def eagle(method: str, *, lost: str = "") -> Saved:
    """Return a function that saves an EAGLE draft, damaged if `lost` is given.

    Args:
        method: eagle or eagle3.
        lost: name of a tensor; it is left out, or, if it is 2-D, saved with its first 32 columns alone.
    """

    def save(folder: Path) -> Path:
        draft = save_eagle_draft(folder, method)
        tensors = load_file(draft / "model.safetensors")
        if lost and (tensor := tensors.pop(lost)).dim() == 2:
            tensors[lost] = tensor[:, :32].contiguous()
        save_file(tensors, draft / "model.safetensors")
        return draft

    return save


LAYER = "model.layers.0"
DEEP = tiny(num_hidden_layers=8)
CHECKPOINTS: list[tuple[str, Saved, Saved, str]] = [
    ("fused", tiny(), tiny(vocab_size=320), r"has 320 tokens, target .* has 288: .* use --speculation_method vanilla"),
    ("fused", tiny(), tiny("qwen2"), r"is a qwen2, target .* a llama"),
    ("fused", tiny("gpt2"), tiny("gpt2"), r"GPT2.* is not supported by backend neuron: .* llama, mixtral"),
    ("fused", DEEP, eagle("eagle"), "use --speculation_method eagle or eagle3"),
    ("eagle", DEEP, eagle("eagle3"), r"fc.weight has shape \[32, 96\], eagle needs \[32, 64\]"),
    ("eagle3", DEEP, eagle("eagle"), r"fc.weight has shape \[32, 64\], eagle3 needs \[32, 96\]"),
    ("eagle3", tiny(), eagle("eagle3"), r"has 2 layers: an EAGLE3 draft reads three .* needs 7 at least"),
    ("eagle", tiny("qwen3"), tiny("qwen3"), "NxDI has eagle for llama alone, not qwen3"),
    # A plain layer after an fc passed for an EAGLE3 draft, and NxDI refused it after hours, when it sharded weights.
    ("eagle3", DEEP, eagle("eagle3", lost=f"{LAYER}.hidden_norm.weight"), "layers.0.hidden_norm.weight is missing"),
    ("eagle3", DEEP, eagle("eagle3", lost="model.norm.weight"), "norm.weight is missing"),
    ("eagle3", DEEP, eagle("eagle3", lost=f"{LAYER}.input_layernorm.weight"), "weight and neuron_config"),
    ("eagle3", DEEP, eagle("eagle3", lost=f"{LAYER}.self_attn.q_proj.weight"), "reads 32 numbers, eagle3 needs 64"),
]


@pytest.mark.parametrize(("method", "target", "draft", "message"), CHECKPOINTS)
def test_checkpoints_that_do_not_pair_are_refused(
    tmp_path: Path, method: str, target: Saved, draft: Saved, message: str
) -> None:
    paths = target(tmp_path / "target"), draft(tmp_path / "draft")
    with pytest.raises(ConfigError, match=message):
        load_decoder(*pair(*paths, method=method), decide)
