"""Backends (libraries that run models) are found by name, and `auto` chooses one for the model and machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specdec.inference.backends import registry
from specdec.inference.backends.onnx import slots
from specdec.inference.backends.onnx.backend import OnnxBackend
from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.backends.registry import examine, load_backend
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError
from tests.support.families_page import PAGE, page
from tests.support.models import FAMILIES, save_tiny_model


def config_for(path: Path, **fields: str) -> ModelConfig:
    return ModelConfig(path, backend="auto", num_slots=1, num_threads=1, **fields)  # type: ignore[arg-type]


def test_auto_is_onnx_where_it_runs_the_model(tmp_path: Path) -> None:
    assert isinstance(load_backend(config_for(save_tiny_model(tmp_path, "llama"))), OnnxBackend)


@pytest.mark.parametrize(
    ("family", "fields"), [("gpt2", {}), ("llama", {"dtype": "bfloat16"})], ids=["family", "dtype"]
)
def test_auto_is_torch_and_warns_for_the_rest(
    tmp_path: Path, family: str, fields: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(load_backend(config_for(save_tiny_model(tmp_path, family), **fields)), TorchBackend)
    assert "backend torch, because" in caplog.text
    assert registry.TORCH_COST in caplog.text


def test_the_page_of_families_is_what_the_contract_suite_runs() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.support.families_page`"


def test_auto_is_torch_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(registry, "_has_cuda", lambda: True)
    monkeypatch.setattr(registry, "_load", lambda name, _: asked.append(name))
    load_backend(config_for(save_tiny_model(tmp_path, "llama")))
    assert asked == ["torch"]


@pytest.mark.parametrize(("backend", "is_told"), [("auto", True), ("torch", False)])
def test_idle_neuron_devices_are_named(
    backend: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that runs on the CPU of a machine with Neuron devices logs how to use them.

    With --backend torch, which somebody has chosen, it logs nothing.

    Regression: without --backend neuron, an 8B model on a Trainium instance silently ran on the CPU.
    """
    path = save_tiny_model(tmp_path, "llama")
    load_backend(config_for(path))
    assert "Neuron" not in caplog.text
    (tmp_path / "neuron0").touch()
    monkeypatch.setattr(registry, "DEVICES", tmp_path)
    load_backend(replace(config_for(path), backend=backend))
    assert ("this machine has Neuron devices, and they stay idle" in caplog.text) == is_told


def test_auto_is_torch_without_onnx_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOADERS, "onnx", ("no_such_package", "load"))
    path = save_tiny_model(tmp_path, "llama")
    assert isinstance(load_backend(config_for(path)), TorchBackend)
    with pytest.raises(ConfigError, match=r"backend onnx needs .* package no_such_package is not installed"):
        load_backend(ModelConfig(path, backend="onnx"))


@pytest.mark.parametrize("fields", [{"sequence_length": 100_000}, {"num_slots": 4096, "sequence_length": 64}])
def test_limits_of_all_backends_are_refused_at_once(
    tmp_path: Path, fields: dict[str, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A value above a limit of all backends is refused by the first, and the log suggests no other backend.

    Regression: the log suggested torch, and the server loaded the model again, only to refuse it.
    """

    def no_memory(num_bytes: int) -> None:
        raise MemoryError(f"no {num_bytes} bytes")

    monkeypatch.setattr(slots, "lazy_zeros", no_memory)
    config = config_for(save_tiny_model(tmp_path, "llama"))
    with pytest.raises(ConfigError, match=r"sequence_length 100000 is above|4096 slots of 64 positions do not fit"):
        load_backend(replace(config, **fields))  # type: ignore[arg-type]
    assert not [record for record in caplog.records if "torch" in record.getMessage()]


def test_a_broken_model_is_named_whatever_was_tried(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no file named"):
        load_backend(config_for(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_examined_model_is_loaded_as_examined(tmp_path: Path, family: str) -> None:
    """Examining a model's files predicts the backend, slot size and context length that the loaded model has."""
    config = ModelConfig(save_tiny_model(tmp_path, family), backend="auto", device="cpu", sequence_length=128)
    fit, loaded = examine(config), load_backend(config)
    assert (fit.slot_bytes, fit.max_length) == (loaded.slot_bytes, loaded.max_length)
    assert getattr(loaded, "arithmetic", "").startswith(f"{fit.backend} ")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"backend": "nonsense"}),
        ("llama", {"backend": "torch", "dtype": "int8"}),
        ("llama", {"backend": "onnx", "dtype": "bfloat16"}),
        ("llama", {"backend": "torch", "device": "cuda:99"}),
        ("gpt2", {"backend": "onnx"}),
        ("gpt2", {"backend": "auto", "dtype": "int8"}),
    ],
    ids=str,
)
def test_an_examination_refuses_what_loading_refuses(tmp_path: Path, family: str, fields: dict[str, str]) -> None:
    config = ModelConfig(save_tiny_model(tmp_path, family), **fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as loading:
        load_backend(config)
    with pytest.raises(ConfigError) as examining:
        examine(config)
    assert str(examining.value) == str(loading.value)
