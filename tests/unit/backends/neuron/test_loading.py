"""What is refused before anything is compiled, what is compiled once, and what a Python without NxDI sees."""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from inference.backends.neuron import artifacts as artifacts_module
from inference.backends.neuron import environment
from inference.backends.neuron.artifacts import artifact_key, artifacts_root, find_or_compile
from inference.backends.neuron.environment import check_cores, check_logical_cores
from inference.backends.neuron.parameters import KNOWN, check_names, parameter_names
from inference.backends.neuron.slots import load_neuron_backend
from inference.backends.registry import load_backend, load_decoder
from inference.config import ROOT, ModelConfig, NeuronOptions
from inference.errors import ConfigError, UnsupportedModelError
from inference.model import Span
from tests.conftest import ModelDirectories
from tests.support.models import save_tiny_model
from tests.support.neuron.checkpoints import save_eagle_draft
from tests.support.neuron.slot_models import checkpoint, neuron_config
from tests.support.nxdi_double.application import NeuronApplication
from tests.support.nxdi_double.config import NeuronConfig
from tests.unit.backends.neuron.test_fused import pair


def without(patch: pytest.MonkeyPatch, *prefixes: str) -> None:
    """Take packages away, and see to it that they cannot be found."""
    for name in [name for name in sys.modules if name.startswith(prefixes)]:
        patch.delitem(sys.modules, name)
    for prefix in prefixes:
        patch.setitem(sys.modules, prefix, None)


def test_no_module_imports_a_neuron_package_by_statement() -> None:
    """They are imported by name, where a model is loaded."""
    for file in (ROOT / "inference").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith(("torch_neuronx", "neuronx", "transformers_neuronx")) for name in names), (
                file
            )


def test_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch_neuronx")
    with pytest.raises(ConfigError, match=r"needs torch-neuronx .*Deep Learning AMI"):
        load_backend(neuron_config(checkpoint("llama")))


@pytest.mark.parametrize("package", ["torch_neuronx", "neuronx_distributed_inference"])
def test_placeholders_are_named_as_such(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    with pytest.raises(ConfigError, match=r"placeholder from PyPI.*AWS's own"):
        load_backend(neuron_config(checkpoint("llama")))


def write_placeholders(folder: Path) -> None:
    """As they are on PyPI: one raises at import, the other lies under a name that cannot be imported."""
    text = 'raise ImportError("WRONG PACKAGE. Please install the package from Neuron Repository")\n'
    for package, module in (
        ("torch_neuronx", "torch_neuronx"),
        ("neuronx_distributed_inference", "neuronx-distributed-inference"),
    ):
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(text)
        information = folder / f"{package}-0.1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")


@pytest.mark.parametrize("package", ["torch_neuronx", "neuronx_distributed_inference"])
def test_placeholders_from_pypi_are_recognised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str) -> None:
    write_placeholders(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    message = rf"installed as {package.replace('_', '-')} is a placeholder from PyPI.*AWS's own"
    with pytest.raises(ConfigError, match=message):
        load_backend(neuron_config(checkpoint("llama")))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"overrides": {"sequence_paralel_enabled": True}}, "no parameter sequence_paralel_enabled: did you mean"),
    ({"overrides": {"trace_tokengen_model": True}}, "no parameter trace_tokengen_model"),
    ({"overrides": {"tp_degree": 4}}, "tp_degree 4 contradicts 1, which is set by --tp_degree"),
    ({"overrides": {"seq_len": 4}}, "which is set by --sequence_length"),
    ({"overrides": {"n_positions": 4}}, "which is set by --sequence_length"),
    ({"overrides": {"enable_fused_speculation": True}}, "contradicts False, which is set by --speculation_method"),
    ({"overrides": {"is_medusa": True}}, "contradicts False, which is set by --speculation_method"),
    ({"overrides": {"on_cpu": True}}, "NxDI's CPU mode: Speculation and float16 are not yet supported"),
    ({"gamma": 0, "tp_degree": 2, "overrides": {"on_cpu": True}}, "NxDI's CPU mode: Please initialize .*torchrun"),
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
    ({"overrides": {"quantized": True, "quantization_dtype": "int4"}}, "quantization_dtype int4 is none of int8"),
    ({"tp_degree": 3}, "hidden_size 32 is not divisible by tp_degree 3"),
    ({"method": "eagle"}, "speculation_method eagle needs a target and a draft model"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_neuron_backend(neuron_config(checkpoint("llama"), **options))


def test_what_nxdi_itself_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, **arguments: object) -> None:
        raise AssertionError("Context bucket 99 should be <= 28")

    monkeypatch.setattr(NeuronConfig, "__init__", refuse)
    with pytest.raises(ConfigError, match="neuron_config: Context bucket 99 should be <= 28"):
        load_neuron_backend(neuron_config(checkpoint("llama")))


def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2.* is not supported by backend neuron: .* llama, qwen3"):
        load_neuron_backend(neuron_config(save_tiny_model(tmp_path, "gpt2")))


def test_a_slot_must_be_longer_than_a_verification() -> None:
    config = ModelConfig(checkpoint("llama"), backend="neuron", sequence_length=6, neuron=NeuronOptions(gamma=4))
    with pytest.raises(ConfigError, match="sequence_length 6 leaves no room beside a verification pass of 5 tokens"):
        load_neuron_backend(config)


def test_a_pair_needs_one_vocabulary_one_family_and_one_dtype(models: ModelDirectories, tmp_path: Path) -> None:
    wide = save_tiny_model(tmp_path / "wide", "llama", vocab_size=320)
    with pytest.raises(ConfigError, match=r"has 320 tokens, target .* has 288"):
        load_decoder(*pair(models.target, wide))
    with pytest.raises(ConfigError, match=r"is a qwen2, target .* a llama"):
        load_decoder(*pair(models.target, models.stranger))


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
    with pytest.raises(ConfigError, match=message):
        load_decoder(*pair(models.target, draft, method=method))


def test_a_draft_may_take_fewer_cores(models: ModelDirectories, artifacts: Path) -> None:
    target, draft = pair(models.target, models.related, tp_degree=4)
    for tp_degree in (4, 2):
        load_decoder(target, replace(draft, neuron=replace(draft.neuron, tp_degree=tp_degree)))
    assert sorted(_draft_degrees(artifacts)) == [(4, 2), (4, 4)]
    with pytest.raises(ConfigError, match="the draft's tp_degree 8 does not divide the target's 4"):
        load_decoder(target, replace(draft, neuron=replace(draft.neuron, tp_degree=8)))


def _draft_degrees(artifacts: Path) -> Iterator[tuple[int, int]]:
    """tp_degree of target and draft as NxDI was given them."""
    for file in artifacts.glob("*/neuron_config.json"):
        config = json.loads(file.read_text())
        yield config["neuron_config"]["tp_degree"], config["draft"][1]["tp_degree"]


def test_int8_is_not_a_dtype_here() -> None:
    with pytest.raises(ConfigError, match="dtype int8 is backend onnx's: here use neuron_config"):
        load_neuron_backend(replace(neuron_config(checkpoint("llama")), dtype="int8"))


def test_parameter_names_are_read_off_the_class_that_is_there() -> None:
    names = parameter_names(NeuronConfig)
    assert {"tp_degree", "fused_qkv", "speculation_length"} <= names
    assert "vocab_parallel" not in names, "the double does not have it"
    assert "vocab_parallel" in parameter_names(None) == KNOWN
    check_names({"vocab_parallel": True}, KNOWN)


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


def test_a_quantized_checkpoint_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, config: object) -> None:
        raise RuntimeError("blockwise_symmetric not supported")

    monkeypatch.setattr(NeuronApplication, "save_quantized_state_dict", refuse)
    overrides = {"quantized": True, "quantized_checkpoints_path": str(tmp_path / "there" / "quantized.pt")}
    with pytest.raises(ConfigError, match=r"quantized.pt cannot be written: blockwise_symmetric not supported"):
        load_neuron_backend(neuron_config(checkpoint("llama"), overrides=overrides))


@pytest.mark.parametrize("name", ["kv_quant_config", "quantized_mlp_kernel_enabled", "activation_quantization_type"])
def test_fp8_beside_the_weights_needs_the_environment_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "0")
    with pytest.raises(ConfigError, match="fp8 needs UNSAFE_FP8FNCAST=1, the environment has 0"):
        load_neuron_backend(neuron_config(checkpoint("llama"), overrides={name: {"direct_cast": True}}))


def test_fp8_sets_its_environment_and_writes_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.FP8_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "1")
    quantized = tmp_path / "quantized.pt"
    overrides = {"quantized": True, "quantized_checkpoints_path": str(quantized), "quantization_dtype": "f8e4m3"}
    load_neuron_backend(neuron_config(checkpoint("llama"), overrides=overrides))
    assert quantized.read_bytes() == b"quantized"
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "0")
    with pytest.raises(ConfigError, match="fp8 needs UNSAFE_FP8FNCAST=1, the environment has 0"):
        load_neuron_backend(neuron_config(checkpoint("llama"), overrides=overrides))


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
    assert all(Path(folder).parent == artifacts for folder in compiled_in)
    assert sorted(folder.name for folder in artifacts.iterdir() if "." in folder.name) == []
    assert "BASE_COMPILE_WORK_DIR" not in os.environ


def test_an_artifact_says_what_it_was_made_from(artifacts: Path) -> None:
    load_and_run(checkpoint("llama"))
    (folder,) = artifacts.iterdir()
    manifest = json.loads((folder / "specdec.json").read_text())
    assert manifest["neuron_config"]["speculation_length"] == 4
    assert manifest["neuron_config"]["save_sharded_checkpoint"] is True
    assert manifest["checkpoints"] == [str(checkpoint("llama"))]


def test_a_compilation_that_fails_leaves_no_artifact_but_its_logs(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, folder: str) -> None:
        raise RuntimeError("neuronx-cc said no")

    monkeypatch.setattr(NeuronApplication, "compile", fail)
    with pytest.raises(ConfigError, match="could not compile it: neuronx-cc said no"):
        load_and_run(checkpoint("llama"))
    monkeypatch.undo()
    assert not [folder for folder in artifacts.iterdir() if "." not in folder.name]
    assert [folder for folder in artifacts.iterdir() if ".work-" in folder.name]


def test_a_long_compilation_shows_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(artifacts_module, "PROGRESS_S", 0.01)

    def compile_slowly(folder: Path) -> None:
        while "compiled model key: compiling for" not in caplog.text:
            time.sleep(0.005)

    find_or_compile(tmp_path, "key", {}, compile_slowly)
    assert "compiled model key: compiled in" in caplog.text


def test_who_is_slower_takes_what_the_faster_one_made(tmp_path: Path) -> None:
    def compile_while_another_finishes(folder: Path) -> None:
        (tmp_path / "key").mkdir()
        (tmp_path / "key" / "specdec.json").write_text("{}")

    assert find_or_compile(tmp_path, "key", {}, compile_while_another_finishes) == tmp_path / "key"
    assert [folder.name for folder in tmp_path.iterdir()] == ["key"]


def test_where_artifacts_lie(tmp_path: Path) -> None:
    variables = {"NEURON_COMPILED_ARTIFACTS": "there", "XDG_CACHE_HOME": "cache"}
    assert artifacts_root(tmp_path, variables) == tmp_path
    assert artifacts_root(None, variables) == Path("there")
    assert artifacts_root(None, {"XDG_CACHE_HOME": "cache"}) == Path("cache/specdec/neuron")


def test_a_key_depends_on_everything() -> None:
    path = checkpoint("llama")
    keys = {
        artifact_key({"a": 1}, [path]),
        artifact_key({"a": 2}, [path]),
        artifact_key({"a": 1}, [path, path]),
        artifact_key({"a": 1}, [checkpoint("qwen3")]),
        artifact_key({"a": 1}, [path / "config.json"]),
    }
    assert len(keys) == 5
    assert artifact_key({"a": 1, "b": 2}, [path]) == artifact_key({"b": 2, "a": 1}, [path])


def test_cpu_mode_compiles_nothing(compiled_in: list[str]) -> None:
    on_cpu = load_and_run(checkpoint("llama"), gamma=0, overrides={"on_cpu": True})
    assert compiled_in == []
    assert on_cpu == load_and_run(checkpoint("llama"), gamma=0)
