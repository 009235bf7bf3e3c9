"""`--device neuron` without a Neuron device: the tests that all backends share, with a stand-in for the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends import registry as compilers
from transformers import PreTrainedModel

from benchmarks import device as judge
from specdec.inference.backends import devices
from specdec.inference.backends.checkpoint import load_weights
from specdec.inference.backends.pytorch import backend as pytorch
from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.backends.pytorch.graphs import Compiled
from specdec.inference.backends.pytorch.shapes import Buckets
from specdec.inference.backends.pytorch.static_pass import FixedShapes, StaticPasses
from specdec.inference.backends.registry import load_backend
from specdec.inference.config import ROOT, ModelConfig, NeuronOptions
from specdec.inference.errors import ConfigError
from specdec.inference.model.slots import Backend, Span
from tests.conftest import ModelDirectories
from tests.support.backend_contract import MAX_LENGTH, NUM_SLOTS, TOKENS, BackendContract
from tests.support.models import CONTRACTS, tiny_model
from tests.support.neuron_compiler import NeuronCompiler

QUICK = ("llama",)
REST = [family for family in CONTRACTS["torch", "float32"] if family not in QUICK]
OLD = ("unknown", "2.9.0.2.13", "1.0.0.1")
BUCKETS = Buckets(widths=(4,), prompts=(8,))


class OverTheStandIn(BackendContract):
    def load(self, family: str) -> TorchBackend:
        fixed = FixedShapes(Compiled(NeuronCompiler(), graphs_only=True), BUCKETS)
        backend = TorchBackend(tiny_model(family), num_slots=NUM_SLOTS, max_length=MAX_LENGTH, fixed=fixed)
        backend.warm_up()
        return backend

    def fresh(self) -> Backend:
        return self.shared("llama")

    def test_there_are_as_many_graphs_as_shapes(self, family: str) -> None:
        backend = self.shared(family)
        assert isinstance(backend, TorchBackend)
        for width in range(1, MAX_LENGTH):
            backend.forward([Span(0, 0, TOKENS[:width], width // 2), Span(2, 0, TOKENS[:1], 1)])
        backend.fork(0, 1, 2, 5)
        assert isinstance(backend.passes, StaticPasses)
        num_copies = 1
        assert backend.graphs.num == len(backend.passes.shapes.all()) + num_copies
        assert backend.graphs.num_late == 0


class TestQuickFamilies(OverTheStandIn):
    families = QUICK


@pytest.mark.release
class TestOtherFamilies(OverTheStandIn):
    families = REST


@pytest.mark.release
def test_another_models_threads_compile_nothing_again() -> None:
    """No pass is compiled again when torch's number of threads changes, as loading another model changes it.

    Regression: a draft loaded later changed the number, and torch compiled the target's passes again.
    """
    backend, num_threads = TestQuickFamilies.shared("llama"), torch.get_num_threads()
    assert isinstance(backend, TorchBackend)
    torch.set_num_threads(num_threads + 1)
    try:
        backend.forward([Span(0, 0, TOKENS[:3], 1)])
        backend.fork(0, 1, 0, 3)
    finally:
        torch.set_num_threads(num_threads)
    assert backend.graphs.num_late == 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> NeuronCompiler:
    """Install a stand-in for TorchNeuron that computes on the CPU; return its compiler."""
    compiler = NeuronCompiler()
    monkeypatch.setitem(compilers._BACKENDS, devices.DEVICE, None)
    monkeypatch.setitem(compilers._COMPILER_FNS, devices.DEVICE, compiler)
    monkeypatch.setattr(pytorch, "resolve_device", lambda name: torch.device("cpu"))
    monkeypatch.setenv(devices.VISIBLE_CORES, "0-31")
    return compiler


def config_of(path: Path, **fields: object) -> ModelConfig:
    given = {"backend": "auto", "device": "neuron", "sequence_length": 16, "num_slots": 2, **fields}
    return ModelConfig(path, **given)  # type: ignore[arg-type]


def test_a_checkpoint_runs_in_graphs_alone(models: ModelDirectories, device: NeuronCompiler) -> None:
    options = NeuronOptions(cores="2-3", gamma=3)
    backend = load_backend(config_of(models.target, dtype="float32", neuron=options))
    assert os.environ[devices.VISIBLE_CORES] == "2-3"
    logits = backend.forward([Span(1, 0, TOKENS[:6], 2), Span(0, 0, TOKENS[:3], 1)])
    plain = load_backend(config_of(models.target, backend="torch", device="cpu"))
    expected = plain.forward([Span(1, 0, TOKENS[:6], 2), Span(0, 0, TOKENS[:3], 1)])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    assert isinstance(backend, TorchBackend)
    assert (backend.graphs.num, backend.graphs.num_late) == (len(device.graphs), 0)
    assert backend.max_pass_tokens == 4


@pytest.mark.release
def test_a_pass_in_bfloat16_chooses_on_the_host(models: ModelDirectories, device: NeuronCompiler) -> None:
    backend = load_backend(config_of(models.target, dtype="bfloat16"))
    logits = backend.forward([Span(0, 0, TOKENS[:3], 1)])
    assert (type(logits), logits.dtype) == (np.ndarray, np.float32)


def test_a_pass_that_cannot_be_compiled_is_named(
    models: ModelDirectories, device: NeuronCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graph: object) -> None:
        raise RuntimeError("NCC_E42: no such operator")

    monkeypatch.setattr(device, "_lower", refuse)
    with pytest.raises(ConfigError, match=r"(?s)cannot be compiled by .*NCC_E42.*this device runs nothing else"):
        load_backend(config_of(models.target))


def test_passes_are_never_left_uncompiled(models: ModelDirectories, device: NeuronCompiler) -> None:
    with pytest.raises(ConfigError, match="compile never: device neuron runs nothing but compiled passes"):
        load_backend(config_of(models.target, compile_policy="never"))


def test_weights_that_do_not_fit_are_named(
    models: ModelDirectories, device: NeuronCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: torch.nn.Module, place: object) -> None:
        raise torch.OutOfMemoryError("24 GiB are taken")

    def loaded(*args: Any, **settings: Any) -> PreTrainedModel:
        model = load_weights(*args, **settings)
        monkeypatch.setattr(type(model), "to", fail)  # it is on the CPU and moves next
        return model

    monkeypatch.setattr("specdec.inference.backends.pytorch.backend.load_weights", loaded)
    with pytest.raises(ConfigError, match=r"weights do not go into the memory of device .*: 24 GiB are taken"):
        load_backend(config_of(models.target))


@pytest.mark.parametrize(
    ("version", "message"),
    [
        *((version, rf"2\.33 or later; the version in this Python is {version} ") for version in OLD),
        ("2.13.3.0", "torch_neuronx cannot be imported"),
    ],
)
def test_a_missing_torchneuron_is_named(
    version: str, message: str, models: ModelDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(devices.VISIBLE_CORES, "0")
    monkeypatch.setattr(devices, "version_of", lambda package: version)
    with pytest.raises(ConfigError, match=message):
        load_backend(config_of(models.target))


@pytest.mark.release
def test_a_device_is_judged_by_its_passes(
    models: ModelDirectories,
    device: NeuronCompiler,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "text").write_text("the rain and the sea " * 20)
    flags = {
        "model": models.target,
        "dtype": "float32",
        "batch": 2,
        "length": 100,
        "rounds": 1,
        "text": tmp_path / "text",
    }
    given = [f"--{name}={value}" for name, value in flags.items()]
    monkeypatch.setattr(sys, "argv", ["benchmarks.device", "--device=neuron", *given])
    judge.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert results["choices"] == {"same": judge.NUM_COMPARED, "tokens": judge.NUM_COMPARED}
    assert results["graphs"]["num"] == len(device.graphs) - len(results["writes"])
    assert [(each["batch"], each["width"]) for each in results["passes"]] == [(2, 1), (2, 5), (1, 100)]
    assert all(each["host"] > 0 for each in results["passes"])


TORCH = """
import os
print("cores when torch is imported:", os.environ.get("NEURON_RT_VISIBLE_CORES"))
raise ModuleNotFoundError("No module named 'torch'", name="torch")
"""


def test_cores_are_taken_before_torch_is_imported(models: ModelDirectories, tmp_path: Path) -> None:
    """NEURON_RT_VISIBLE_CORES, which names this process's cores, is set before torch is imported.

    PyTorch loads TorchNeuron while it is imported, and the runtime then takes the cores that it finds.
    """
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    flags = ["--role", "verify_target", "--device", "neuron", "--neuron_cores", "4-5", "--prompt", "x"]
    run = subprocess.run(
        [sys.executable, "main.py", *flags, "--model", str(models.target)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert set(run.stdout.splitlines()) == {"cores when torch is imported: 4-5"}
