"""Choice of the NxDI (AWS's NxD Inference) for a test run, by `pytest --nxdi double|real`: a stand-in, or its sources.

A test must pass on both, unless it requires one by the fixture `on_double` or `on_real`. Processes that a test
starts can run only on NxDI's own sources, which `PYTHON_PATH` lets them import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.config import ROOT
from tests import nxdi_real
from tests.support.nxdi_parameters import KNOWN

OPTION = "--nxdi"
PYTHON_PATH = f"{Path(nxdi_real.__file__).parent / 'site'}{os.pathsep}{ROOT}"
"""PYTHONPATH with which processes that a test starts can import NxDI's own sources."""


@dataclass(frozen=True)
class Nxdi:
    """The NxDI (AWS's NxD Inference) that this test run uses: the stand-in ("double"), or NxDI's own sources.

    Attributes:
        is_real: whether these are NxDI's own sources.
        calls: graph and shape of input_ids of every model call in this process, in order.
        compiled_in: work directory of every compilation in this process, in order.
        install: function that makes NxDI importable in this process, until the given patch is undone.
    """

    is_real: bool
    calls: list[tuple[str, tuple[int, ...]]]
    compiled_in: list[str]
    install: Callable[[pytest.MonkeyPatch], None]

    @property
    def application_class(self) -> Any:
        """NxDI's base class of all compiled models ("applications"), with `compile` and `save_quantized_state_dict`."""
        if not self.is_real:
            from tests.support.nxdi_double.application import NeuronApplication

            return NeuronApplication
        from neuronx_distributed_inference.models import application_base

        return application_base.NeuronApplicationBase


def _double() -> Nxdi:
    from tests.support import nxdi_double  # imports torch
    from tests.support.nxdi_double.application import NeuronApplication

    def install(patch: pytest.MonkeyPatch) -> None:
        nxdi_double.install(patch)
        names = "specdec.inference.backends.neuron.graphs.application.parameter_names"
        patch.setattr(names, lambda _: KNOWN)  # the double's source has no names

    return Nxdi(False, NeuronApplication.calls, NeuronApplication.compiled_in, install)


def _real() -> Nxdi:
    from tests.nxdi_real import device, hooks

    hooks.arm()
    return Nxdi(True, device.CALLS, device.COMPILED_IN, lambda _: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, choices=["double", "real"], default="double", help="which NxDI the neuron tests run on")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare NxDI's own sources if `--nxdi real` is given, and ignore the warnings of their modules."""
    if config.getoption(OPTION) == "real":
        _real()
        for module in ("neuronx_distributed", "neuronx_distributed_inference", "torch"):
            config.addinivalue_line("filterwarnings", rf"ignore:::{module}(\..*)?")


@pytest.fixture(scope="session")
def nxdi(pytestconfig: pytest.Config) -> Nxdi:
    return _real() if pytestconfig.getoption(OPTION) == "real" else _double()


# A wider fixture comes first: a test that is skipped starts no servers, and makes no models.


@pytest.fixture(scope="session")
def on_double(nxdi: Nxdi) -> None:
    """Skip the test if this run uses NxDI's own sources, about which it says nothing."""
    if nxdi.is_real:
        pytest.skip("says nothing about NxDI's sources")


@pytest.fixture(scope="session")
def cpu_mode(nxdi: Nxdi) -> None:
    """Skip the test if this run uses NxDI 0.8's own sources: its CPU mode cannot run text models."""
    if nxdi.is_real and version("neuronx-distributed-inference").startswith("0.8."):
        pytest.skip("the CPU mode of NxDI 0.8 serves no text model")


@pytest.fixture(scope="session")
def on_real(nxdi: Nxdi) -> None:
    """Skip the test if this run uses the stand-in for NxDI: the test needs NxDI's own sources."""
    if not nxdi.is_real:
        pytest.skip("needs NxDI's sources: make test-nxdi NXDI_SOURCES=DIR")
