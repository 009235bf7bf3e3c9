"""Fixtures of the neuron tests: NxDI (AWS's NxD Inference) or a stand-in, and a folder for compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nxdi import Nxdi


@pytest.fixture(autouse=True)
def _neuron(nxdi: Nxdi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        nxdi.install(patch)
        patch.setenv("NEURON_RT_VISIBLE_CORES", "0-31")
        patch.setenv("NEURON_COMPILED_ARTIFACTS", str(tmp_path_factory.getbasetemp() / "artifacts"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        nxdi.calls.clear()
        nxdi.compiled_in.clear()
        yield


@pytest.fixture(autouse=True)
def _no_step_is_repeated(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which the engine repeated a failed step; the tokens would be right, so nothing else shows it."""
    yield
    assert "a step over" not in caplog.text


@pytest.fixture
def calls(nxdi: Nxdi) -> list[tuple[str, tuple[int, ...]]]:
    """Return the list of all calls of compiled graphs in this test, in order: (graph, shape of input_ids)."""
    return nxdi.calls


@pytest.fixture
def compiled_in(nxdi: Nxdi) -> list[str]:
    """Return the list of the work directories of all compilations in this test."""
    return nxdi.compiled_in


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "artifacts"
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(folder))
    return folder
