"""The double of NxDI in place of the real one, and a folder of its own for what it compiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import nxdi_double
from tests.support.nxdi_double.application import NeuronApplication


@pytest.fixture(autouse=True)
def _neuron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)  # a test before may have loaded a torch backend; threads that wait for each other are slow
    with pytest.MonkeyPatch.context() as patch:
        nxdi_double.install(patch)
        patch.setenv("NEURON_RT_VISIBLE_CORES", "0-31")
        patch.setenv("NEURON_COMPILED_ARTIFACTS", str(tmp_path_factory.getbasetemp() / "artifacts"))
        NeuronApplication.calls.clear()
        NeuronApplication.compiled_in.clear()
        yield


@pytest.fixture
def calls() -> list[tuple[str, tuple[int, ...]]]:
    """(graph, shape of input_ids) of every call, in order."""
    return NeuronApplication.calls


@pytest.fixture
def compiled_in() -> list[str]:
    """Work directory of every compilation."""
    return NeuronApplication.compiled_in


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "artifacts"
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(folder))
    return folder
