"""Errors where NxDI (AWS's NxD Inference) is not installed, or PyPI's placeholder is installed under its name."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from specdec.inference.backends.registry import load_backend
from specdec.inference.errors import ConfigError
from tests.support.neuron.slot_models import checkpoint, neuron_config

pytestmark = pytest.mark.usefixtures("on_double")


def forget(patch: pytest.MonkeyPatch, package: str) -> None:
    """Remove a package from `sys.modules`, so that the next import searches for it again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        patch.delitem(sys.modules, name)


def test_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "torch_neuronx")
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)
    with pytest.raises(ConfigError, match=r"needs torch-neuronx .*Deep Learning AMI"):
        load_backend(neuron_config(checkpoint("llama")))


@pytest.mark.parametrize("package", ["torch_neuronx", "neuronx_distributed_inference"])
def test_placeholders_are_named_as_such(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    forget(monkeypatch, package)
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    with pytest.raises(ConfigError, match=r"placeholder from PyPI.*AWS's own"):
        load_backend(neuron_config(checkpoint("llama")))


def write_placeholders(folder: Path) -> None:
    """Write two packages like PyPI's placeholders: one raises ImportError at import, one has no importable name."""
    text = 'raise ImportError("WRONG PACKAGE. Please install the package from Neuron Repository")\n'
    for package, module in (
        ("torch_neuronx", "torch_neuronx"),
        ("neuronx_distributed_inference", "neuronx-distributed-inference"),
    ):
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(text)
        write_information(folder, package, "0.1.0")


def write_information(folder: Path, package: str, version: str) -> None:
    """Write the metadata folder of an installed package, as pip does."""
    information = folder / f"{package}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.mark.parametrize("package", ["torch_neuronx", "neuronx_distributed_inference"])
def test_placeholders_from_pypi_are_recognised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str) -> None:
    write_placeholders(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    forget(monkeypatch, package)
    message = rf"installed as {package.replace('_', '-')} is a placeholder from PyPI.*AWS's own"
    with pytest.raises(ConfigError, match=message):
        load_backend(neuron_config(checkpoint("llama")))


@pytest.mark.parametrize("backend", ["neuron", "transformers-neuronx"])
def test_torchneuron_is_no_placeholder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str) -> None:
    """A torch-neuronx without XLA (TorchNeuron, of SDK 2.33) is refused under its own name, not as a placeholder.

    Regression: SDK 2.33's torch-neuronx, which has no XLA, was called a placeholder from PyPI.
    """
    (tmp_path / "torch_neuronx").mkdir()
    (tmp_path / "torch_neuronx" / "__init__.py").touch()
    write_information(tmp_path, "torch_neuronx", "2.14.3.0")
    monkeypatch.syspath_prepend(tmp_path)
    forget(monkeypatch, "torch_neuronx")
    message = r"torch-neuronx 2\.14\.3\.0 is TorchNeuron, on which NxD Inference does not run.*sdk2\.31\.1-"
    with pytest.raises(ConfigError, match=message) as caught:
        load_backend(replace(neuron_config(checkpoint("llama"), num_slots=1), backend=backend))
    assert "placeholder" not in str(caught.value)
