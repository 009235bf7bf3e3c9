"""Refusals before anything is compiled, models that are compiled once, and Python without NxDI."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from specdec.inference.backends.devices import check_cores
from specdec.inference.backends.neuron import environment
from specdec.inference.backends.neuron.backend import load_neuron_backend, prepare_slots
from specdec.inference.backends.neuron.environment import check_logical_cores
from specdec.inference.backends.registry import load_decoder
from specdec.inference.config import ROOT, ModelConfig, NeuronOptions
from specdec.inference.errors import ConfigError, UnsupportedModelError
from specdec.inference.model.slots import Span
from specdec.inference.speculation.slot_decoder import decide
from tests.conftest import ModelDirectories
from tests.support.models import save_tiny_model
from tests.support.neuron.checkpoints import save_eagle_draft
from tests.support.neuron.slot_models import checkpoint, neuron_config
from tests.support.nxdi import Nxdi
from tests.unit.backends.neuron.test_fused import pair


def test_no_module_imports_a_neuron_package_by_statement() -> None:
    """Neuron's packages are imported by name, when a model is loaded."""
    for file in (ROOT / "inference").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith(("torch_neuronx", "neuronx", "transformers_neuronx")) for name in names), (
                file
            )


def quantized(**more: Any) -> dict[str, Any]:
    """Return the options of a model with weights quantized per tensor, NxDI's default."""
    return {"overrides": {"quantized": True, "quantized_checkpoints_path": "there", **more}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"overrides": {"sequence_paralel_enabled": True}}, "no parameter sequence_paralel_enabled: did you mean"),
    ({"overrides": {"trace_tokengen_model": True}}, "no parameter trace_tokengen_model"),
    ({"overrides": {"tp_degree": 4}}, "tp_degree 4 contradicts 1, which is set by --tp_degree"),
    ({"overrides": {"seq_len": 4}}, "which is set by --sequence_length"),
    ({"overrides": {"n_positions": 4}}, "which is set by --sequence_length"),
    ({"overrides": {"enable_fused_speculation": True}}, "contradicts False, which is set by --speculation_method"),
    ({"overrides": {"is_medusa": True}}, "contradicts False, which is set by --speculation_method"),
    ({"overrides": {"on_cpu": True}}, "on_cpu: NxDI's CPU mode does not speculate: use --gamma 0"),
    ({"gamma": 0, "tp_degree": 2, "overrides": {"on_cpu": True}}, "on_cpu: tp_degree 2 needs as many processes"),
    (
        {"tp_degree": 8, "length": 32, "overrides": {"sequence_parallel_enabled": True}},
        "sequence_parallel_enabled: tp_degree 8 does not divide prompts of 36 tokens",
    ),
    (
        {"tp_degree": 8, "overrides": {"sequence_parallel_enabled": True, "context_encoding_buckets": [16, 20]}},
        "tp_degree 8 does not divide prompts of 20 tokens",
    ),
    ({"overrides": {"apply_seq_ids_mask": False}}, "live slots would be overwritten"),
    ({"overrides": {"on_device_sampling_config": {"top_k": 5}}}, "on_device_sampling_config does not go with"),
    ({"overrides": {"async_mode": True}}, "async_mode does not go with this server"),
    ({"overrides": {"is_prefix_caching": True}}, "is_prefix_caching does not go with"),
    ({"overrides": {"spec_batch_size": 1}}, "exactly one of token_generation_buckets"),
    ({"overrides": {"context_encoding_buckets": [4, 16]}}, "a context bucket of 4 tokens"),
    ({"overrides": {"kv_cache_quant": True}}, "kv_cache_quant alone has no effect: add kv_quant_config"),
    ({"overrides": {"quantized": True}}, "needs quantized_checkpoints_path"),
    (quantized(modules_to_not_convert=["lm_head"]), "modules_to_not_convert: .*set quantization_type per_channel"),
    (quantized(quantization_dtype="f8e4m3"), "quantization_dtype f8e4m3: .*set quantization_type per_channel"),
    ({"overrides": {"output_logits": True}}, "output_logits True contradicts False, which is set by --device_sampling"),
    (
        {"device_sampling": True},
        "device_sampling: a draft, or a target that verifies one, needs",
    ),
    ({"overrides": {"quantized": True, "quantization_dtype": "int4"}}, "quantization_dtype int4 is none of int8"),
    ({"overrides": {"context_encoding_buckets": [99]}}, "^neuron_config: Context bucket 99 should be <= 28$"),
    ({"tp_degree": 3}, "hidden_size 32 is not divisible by tp_degree 3"),
    ({"method": "eagle"}, "speculation_method eagle needs a target and a draft model"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_neuron_backend(neuron_config(checkpoint("llama"), **options))


def test_a_quantized_pair_names_the_drafts_exceptions(models: ModelDirectories, tmp_path: Path) -> None:
    """A quantized pair must name the draft's layers in full precision, or is refused at once.

    It was once otherwise: NxDI took a draft's layers for quantized, and raised KeyError after it had written the
    target.
    """
    options = quantized(quantized_checkpoints_path=str(tmp_path / "int8.pt"), quantization_type="per_channel_symmetric")
    with pytest.raises(ConfigError, match="a quantized pair needs draft_model_modules_to_not_convert"):
        load_decoder(*pair(models.target, models.related, **options), decide)
    options["overrides"]["draft_model_modules_to_not_convert"] = ["lm_head", "embed_tokens", "layers"]
    options["overrides"]["modules_to_not_convert"] = ["lm_head"]
    assert load_decoder(*pair(models.target, models.related, **options), decide) is not None


def test_an_old_nxdi_names_the_image_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "0.6.10598+1a2b")
    with pytest.raises(ConfigError, match=r"needs NxD Inference 0.7 or newer.* has 0.6.*sdk2.29.1"):
        load_neuron_backend(neuron_config(checkpoint("llama")))


def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2.* is not supported by backend neuron: .* llama, mixtral"):
        load_neuron_backend(neuron_config(save_tiny_model(tmp_path, "gpt2")))


def test_a_slot_must_be_longer_than_a_verification() -> None:
    config = ModelConfig(checkpoint("llama"), backend="neuron", sequence_length=6, neuron=NeuronOptions(gamma=4))
    with pytest.raises(ConfigError, match="sequence_length 6 leaves no room beside a verification pass of 5 tokens"):
        load_neuron_backend(config)


def test_a_pair_needs_one_vocabulary_family_and_dtype(models: ModelDirectories, tmp_path: Path) -> None:
    wide = save_tiny_model(tmp_path / "wide", "llama", vocab_size=320)
    with pytest.raises(ConfigError, match=r"has 320 tokens, target .* has 288: .* use --speculation_method vanilla"):
        load_decoder(*pair(models.target, wide), decide)
    with pytest.raises(ConfigError, match=r"is a qwen2, target .* a llama"):
        load_decoder(*pair(models.target, models.stranger), decide)


@pytest.mark.parametrize(
    ("method", "made_for", "message"),
    [
        ("eagle", "eagle3", r"fc.weight has shape \[32, 96\], eagle needs \[32, 64\]"),
        ("eagle3", "eagle", r"fc.weight has shape \[32, 64\], eagle3 needs \[32, 96\]"),
        ("fused", "eagle", "use --speculation_method eagle or eagle3"),
    ],
)
def test_a_draft_must_be_of_its_method(
    models: ModelDirectories, tmp_path: Path, method: str, made_for: str, message: str
) -> None:
    draft = save_eagle_draft(tmp_path / "draft", made_for)
    target = save_tiny_model(tmp_path / "target", "llama", num_hidden_layers=8)
    with pytest.raises(ConfigError, match=message):
        load_decoder(*pair(target, draft, method=method), decide)


def test_an_eagle_target_needs_layers_and_family(models: ModelDirectories, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 2 layers: an EAGLE3 draft reads three .* needs 7 at least"):
        load_decoder(*pair(models.target, save_eagle_draft(tmp_path / "draft", "eagle3"), method="eagle3"), decide)
    qwen3 = save_tiny_model(tmp_path / "qwen3", "qwen3")
    with pytest.raises(ConfigError, match="NxDI has eagle for llama alone, not qwen3"):
        load_decoder(*pair(qwen3, qwen3, method="eagle"), decide)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("model.layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight is missing"),
        ("model.norm.weight", "norm.weight is missing"),
        ("model.layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight and neuron_config"),
        ("model.layers.0.self_attn.q_proj.weight", "q_proj.weight reads 32 numbers, eagle3 needs 64"),
    ],
)
def test_an_eagle3_draft_is_checked_before_hours_of_compiling(tmp_path: Path, lost: str, message: str) -> None:
    """A draft that is no EAGLE3 draft is refused before anything is compiled.

    It was once otherwise: a plain layer after an fc passed for an EAGLE3 draft, and NxDI refused it when it sharded
    weights.
    """
    draft = save_eagle_draft(tmp_path / "draft", "eagle3")
    tensors = load_file(draft / "model.safetensors")
    tensor = tensors.pop(lost)
    if tensor.dim() == 2:
        tensors[lost] = tensor[:, :32].contiguous()
    save_file(tensors, draft / "model.safetensors")
    target = save_tiny_model(tmp_path / "target", "llama", num_hidden_layers=8)
    with pytest.raises(ConfigError, match=message):
        load_decoder(*pair(target, draft, method="eagle3"), decide)


TREE = {"0": ["1", "2"], "1": ["3"], "2": ["4"]}


def test_a_token_tree_fits_a_pass(models: ModelDirectories, tmp_path: Path) -> None:
    draft = save_eagle_draft(tmp_path / "draft", "eagle")
    options: dict[str, Any] = {"method": "eagle", "overrides": {"token_tree_config": TREE}}
    with pytest.raises(ConfigError, match=r"token_tree_config has 5 nodes, .* must be as many, not 4"):
        load_decoder(*pair(models.target, draft, **options), decide)
    assert load_decoder(*pair(models.target, draft, width=5, **options), decide) is not None
    with pytest.raises(ConfigError, match="token_tree_config goes with eagle, not with fused"):
        load_decoder(*pair(models.target, models.related, width=5, overrides={"token_tree_config": TREE}), decide)


def test_a_draft_may_take_fewer_cores(models: ModelDirectories, artifacts: Path) -> None:
    target, draft = pair(models.target, models.related, tp_degree=4)
    for tp_degree in (4, 2):
        load_decoder(target, replace(draft, neuron=replace(draft.neuron, tp_degree=tp_degree)), decide)
    assert sorted(_draft_degrees(artifacts)) == [(4, 2), (4, 4)]
    with pytest.raises(ConfigError, match="the draft's tp_degree 8 does not divide the target's 4"):
        load_decoder(target, replace(draft, neuron=replace(draft.neuron, tp_degree=8)), decide)


def _draft_degrees(artifacts: Path) -> Iterator[tuple[int, int]]:
    """Return the tp_degree of target and draft as NxDI got them."""
    for file in artifacts.glob("*/*/neuron_config.json"):
        config = json.loads(file.read_text())
        draft = config["fused_spec_config"]["draft_config"]
        yield config["neuron_config"]["tp_degree"], draft["neuron_config"]["tp_degree"]


def test_int8_is_not_a_dtype_here() -> None:
    with pytest.raises(ConfigError, match="dtype int8 is backend onnx's: here use neuron_config"):
        load_neuron_backend(replace(neuron_config(checkpoint("llama")), dtype="int8"))


def test_cores() -> None:
    check_cores(8, {"NEURON_RT_VISIBLE_CORES": "0-3,8-11"})
    check_cores(2, {"NEURON_RT_NUM_CORES": "2"})
    with pytest.raises(ConfigError, match="NEURON_RT_VISIBLE_CORES=0-3 gives 4 NeuronCores, tp_degree 8 needs"):
        check_cores(8, {"NEURON_RT_VISIBLE_CORES": "0-3"})
    with pytest.raises(ConfigError, match="NEURON_RT_NUM_CORES=two cannot be read"):
        check_cores(1, {"NEURON_RT_NUM_CORES": "two"})


def test_logical_cores_must_agree_with_the_environment() -> None:
    check_logical_cores({"logical_nc_config": 2}, {"NEURON_LOGICAL_NC_CONFIG": "2"})
    with pytest.raises(ConfigError, match="logical_nc_config 2 contradicts NEURON_RT_VIRTUAL_CORE_SIZE=1"):
        check_logical_cores({"logical_nc_config": 2}, {"NEURON_RT_VIRTUAL_CORE_SIZE": "1"})


def test_an_unwritable_quantized_checkpoint_is_one_line(tmp_path: Path) -> None:
    path = str(tmp_path / "there" / "quantized.pt")
    options = quantized(quantized_checkpoints_path=path, quantization_type="blockwise_symmetric")
    with pytest.raises(ConfigError, match=r"quantized.pt cannot be written: .*blockwise_symmetric not supported"):
        load_neuron_backend(neuron_config(checkpoint("llama"), **options))


@pytest.mark.parametrize("name", ["kv_quant_config", "quantized_mlp_kernel_enabled", "activation_quantization_type"])
def test_fp8_beside_the_weights_needs_the_environment_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "0")
    with pytest.raises(ConfigError, match="fp8 needs UNSAFE_FP8FNCAST=1, the environment has 0"):
        load_neuron_backend(neuron_config(checkpoint("llama"), overrides={name: {"direct_cast": True}}))


def test_fp8_sets_its_environment_and_writes_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.FP8_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "1")
    file = tmp_path / "quantized.pt"
    options = quantized(
        quantized_checkpoints_path=str(file), quantization_dtype="f8e4m3", quantization_type="per_channel_symmetric"
    )
    load_neuron_backend(neuron_config(checkpoint("llama"), **options))
    assert file.stat().st_size
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "0")
    with pytest.raises(ConfigError, match="fp8 needs UNSAFE_FP8FNCAST=1, the environment has 0"):
        load_neuron_backend(neuron_config(checkpoint("llama"), **options))


def load_and_run(path: Path, **options: Any) -> bytes:
    backend = load_neuron_backend(neuron_config(path, **options))
    return np.asarray(backend.forward([Span(0, 0, (5, 6, 7), 2)])).tobytes()


def test_a_model_is_compiled_once_per_configuration_and_checkpoint(
    artifacts: Path,
    compiled_in: list[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    path = save_tiny_model(tmp_path / "model", "llama")
    first = load_and_run(path)
    assert len(compiled_in) == 1
    assert f"miss in {artifacts}, compiling" in caplog.text
    caplog.clear()
    assert load_and_run(path) == first
    assert len(compiled_in) == 1
    assert f"hit in {artifacts}" in caplog.text
    load_and_run(path, gamma=2)
    load_and_run(path, overrides={"fused_qkv": True})
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O3")
    load_and_run(path)
    monkeypatch.delenv("NEURON_CC_FLAGS")
    save_tiny_model(path, "llama", seed=8)
    assert load_and_run(path) != first
    assert len(compiled_in) == 5
    assert len(set(compiled_in)) == 5, "two compilers must not share a work directory"
    assert not any(Path(folder).is_relative_to(artifacts) for folder in compiled_in)
    assert not any(Path(folder).exists() for folder in compiled_in)
    assert "BASE_COMPILE_WORK_DIR" not in os.environ


def test_an_artifact_names_its_origin(artifacts: Path) -> None:
    load_and_run(checkpoint("llama"))
    (folder,) = artifacts.glob("*/*")
    manifest = json.loads((folder / "specdec.json").read_text())
    assert manifest["neuron_config"]["speculation_length"] == 4
    assert manifest["neuron_config"]["save_sharded_checkpoint"] is True
    assert manifest["checkpoints"] == [str(checkpoint("llama"))]
    assert manifest["format"] == environment.FORMAT
    packages = {"neuronx-distributed-inference", "neuronx-distributed", "torch-neuronx", "neuronx-cc"}
    assert manifest["versions"].keys() == packages


def test_an_artifact_of_another_format_is_not_taken(
    artifacts: Path, compiled_in: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled model is not taken if a version with other graphs made it.

    It was once otherwise: after a change of our graphs, which no setting records, a new version loaded models of the
    old one.
    """
    load_and_run(checkpoint("llama"))
    monkeypatch.setattr(environment, "FORMAT", environment.FORMAT + 1)
    load_and_run(checkpoint("llama"))
    assert len(compiled_in) == len(list(artifacts.iterdir())) == 2


def test_an_artifact_stands_alone(tmp_path: Path, artifacts: Path) -> None:
    """A compiled model loads without the checkpoint, since it holds weights and configuration.

    Only its key, by which a store finds it, cannot be computed then.
    """
    path = save_tiny_model(tmp_path / "model", "llama")
    compilation, _ = prepare_slots(neuron_config(path))
    folder = compilation.compiled()
    (path / "model.safetensors").unlink()
    compilation.application_class(f"{folder}/").load(f"{folder}/")


def test_a_failed_compilation_leaves_only_its_logs(
    artifacts: Path, nxdi: Nxdi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object, folder: str) -> None:
        raise RuntimeError("neuronx-cc said no")

    monkeypatch.setattr(nxdi.application_class, "compile", fail)
    with pytest.raises(ConfigError, match="could not compile it: neuronx-cc said no"):
        load_and_run(checkpoint("llama"))
    monkeypatch.undo()
    assert not list(artifacts.iterdir())
    (kept,) = re.findall(r"the compiler's files are kept in (.*)", caplog.text)
    assert Path(kept, "compiler").is_dir()


def test_cpu_mode_compiles_nothing(compiled_in: list[str]) -> None:
    on_cpu = load_and_run(checkpoint("llama"), gamma=0, overrides={"on_cpu": True})
    assert compiled_in == []
    assert on_cpu == load_and_run(checkpoint("llama"), gamma=0)
