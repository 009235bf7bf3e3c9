"""Impossible models are refused before anything is compiled, each is compiled only once; Python without NxDI works."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.inference.backends.devices import take_cores
from specdec.inference.backends.neuron import environment
from specdec.inference.backends.neuron.backend import load_neuron_backend, slot_model
from specdec.inference.backends.neuron.environment import check_logical_cores
from specdec.inference.backends.registry import load_decoder
from specdec.inference.config import ROOT
from specdec.inference.errors import ConfigError
from specdec.inference.model.slots import Span
from specdec.inference.speculation.slot_decoder import decide
from tests.conftest import ModelDirectories
from tests.support.models import save_tiny_model
from tests.support.neuron.slot_models import checkpoint, neuron_config
from tests.support.nxdi import Nxdi
from tests.unit.backends.neuron.test_fused import pair


def test_no_module_imports_a_neuron_package_by_statement() -> None:
    """No module has an import statement for a Neuron package: they are imported by name when a model is loaded."""
    for file in (ROOT / "specdec" / "inference").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith(("torch_neuronx", "neuronx", "transformers_neuronx")) for name in names), (
                file
            )


def quantized(path: Path, kind: str, **more: Any) -> dict[str, Any]:
    """Return neuron options of a model with quantized weights: of quantization type `kind`, stored at `path`.

    Args:
        path: the file or folder of the quantized weights.
        kind: as in NxDI's NeuronConfig, such as per_channel_symmetric.
        more: further fields of NeuronConfig.
    """
    given = {"quantized": True, "quantized_checkpoints_path": str(path), "quantization_type": kind}
    return {"overrides": {**given, **more}}


@pytest.mark.usefixtures("on_real")
def test_a_quantized_pair_names_the_drafts_exceptions(models: ModelDirectories, tmp_path: Path) -> None:
    """A quantized target is loaded with a draft whose layers are named as being in full precision.

    Regression: NxDI took the draft's layers for quantized, and raised KeyError.
    """
    rest = {"draft_model_modules_to_not_convert": ["lm_head", "embed_tokens", "layers"]}
    options = quantized(tmp_path / "int8.pt", "per_channel_symmetric", modules_to_not_convert=["lm_head"], **rest)
    assert load_decoder(*pair(models.target, models.related, **options), decide) is not None


def test_a_draft_may_take_fewer_cores(models: ModelDirectories, artifacts: Path) -> None:
    target, draft = pair(models.target, models.related, tp_degree=4)
    for tp_degree in (4, 2):
        load_decoder(target, replace(draft, neuron=replace(draft.neuron, tp_degree=tp_degree)), decide)
    assert sorted(_draft_degrees(artifacts)) == [(4, 2), (4, 4)]
    with pytest.raises(ConfigError, match="the draft's tp_degree 8 does not divide the target's 4"):
        load_decoder(target, replace(draft, neuron=replace(draft.neuron, tp_degree=8)), decide)


def _draft_degrees(artifacts: Path) -> Iterator[tuple[int, int]]:
    """Yield (tp_degree of the target, tp_degree of the draft) from the configuration of each compiled pair."""
    for file in artifacts.glob("*/*/neuron_config.json"):
        config = json.loads(file.read_text())
        draft = config["fused_spec_config"]["draft_config"]
        yield config["neuron_config"]["tp_degree"], draft["neuron_config"]["tp_degree"]


def test_too_few_visible_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    take_cores("0-3,8-11", 8)
    with pytest.raises(ConfigError, match="NEURON_RT_VISIBLE_CORES=0-3 gives 4 NeuronCores, tp_degree 8 needs"):
        take_cores("0-3", 8)
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    take_cores(None, 2)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "two")
    with pytest.raises(ConfigError, match="NEURON_RT_NUM_CORES=two cannot be read"):
        take_cores(None, 1)


def test_logical_cores_must_agree_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    check_logical_cores({"logical_nc_config": 2})
    monkeypatch.setenv("NEURON_RT_VIRTUAL_CORE_SIZE", "1")
    with pytest.raises(ConfigError, match="logical_nc_config 2 contradicts NEURON_RT_VIRTUAL_CORE_SIZE=1"):
        check_logical_cores({"logical_nc_config": 2})


@pytest.mark.usefixtures("on_real")
def test_an_unwritable_quantized_checkpoint_is_one_line(tmp_path: Path) -> None:
    options = quantized(tmp_path / "there" / "quantized.pt", "blockwise_symmetric")
    with pytest.raises(ConfigError, match=r"quantized.pt cannot be written: .*blockwise_symmetric not supported"):
        load_neuron_backend(neuron_config(checkpoint("llama"), **options))


@pytest.mark.parametrize("name", ["kv_quant_config", "quantized_mlp_kernel_enabled", "activation_quantization_type"])
def test_fp8_beside_the_weights_needs_the_environment_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "0")
    with pytest.raises(ConfigError, match="fp8 needs UNSAFE_FP8FNCAST=1, the environment has 0"):
        load_neuron_backend(neuron_config(checkpoint("llama"), overrides={name: {"direct_cast": True}}))


@pytest.mark.usefixtures("on_real")
def test_fp8_sets_its_environment_and_writes_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.FP8_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "1")
    file = tmp_path / "quantized.pt"
    options = quantized(file, "per_channel_symmetric", quantization_dtype="f8e4m3")
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


def test_an_artifact_stands_alone(tmp_path: Path, artifacts: Path) -> None:
    """A compiled model loads without the checkpoint, since it holds weights and configuration.

    Without the checkpoint, only the key by which a store finds the model cannot be computed.
    """
    path = save_tiny_model(tmp_path / "model", "llama")
    compilation = slot_model(neuron_config(path))
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


@pytest.mark.usefixtures("on_real")
@pytest.mark.usefixtures("cpu_mode")
def test_cpu_mode_compiles_nothing(compiled_in: list[str]) -> None:
    on_cpu = load_and_run(checkpoint("llama"), gamma=0, overrides={"on_cpu": True})
    assert compiled_in == []
    assert on_cpu == load_and_run(checkpoint("llama"), gamma=0)
