"""Makes NxDI's own sources (AWS's NxD Inference) importable on a CPU, under their own names."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import re
import socket
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCES = "NXDI_SOURCES"
"""Name of the environment variable with the folder of the clones of NxD's and NxDI's repositories."""
FOLDERS = ("neuronx-distributed-inference/src", "neuronx-distributed/src")
VERSIONS = {"torch-neuronx": "2.9.0", "neuronx-cc": "2.24.0", "neuronx-distributed": "0.18.0"}
"""Versions that are reported for packages with stand-ins or without a version; NxDI's own is read from its sources."""
_ENVIRONMENT = {"NXD_CPU_MODE": "1", "NXD_LOG_LEVEL": "error"}


def arm() -> None:
    """Let this process import NxDI's sources, and stand-ins for the other packages of a Neuron machine.

    Raises:
        KeyError: the environment variable NXDI_SOURCES is not set.
    """
    if any(isinstance(finder, _Changes) for finder in sys.meta_path):
        return
    folders = [Path(os.environ[SOURCES]) / folder for folder in FOLDERS]
    sys.path.extend(str(folder) for folder in folders)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "RANK" not in os.environ:  # a launcher of several ranks has chosen theirs
        os.environ["MASTER_PORT"] = str(_free_port())
    sys.meta_path.insert(0, _Changes(folders[0]))


def _free_port() -> int:
    """Return a free port for this process's process group; NxDI's CPU mode would use 29500 in every process."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class _Changes(importlib.abc.MetaPathFinder):
    """Import finder that changes some modules of NxDI after their import.

    At the first import of a Neuron package it also sets up the stand-ins, which need torch.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._stubs: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in _NEURON:
            self._find_stubs()
        if fullname.partition(".")[0] not in ("neuronx_distributed", "neuronx_distributed_inference"):
            return None if self._stubs is None else self._stubs.find_spec(fullname)
        from tests.nxdi_real.device import CHANGES

        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None and fullname in CHANGES:
            _change_behind(spec.loader, CHANGES[fullname])
        return spec

    def _find_stubs(self) -> None:
        if self._stubs is not None:
            return
        import torch

        from tests.nxdi_real.stubs import StubFinder, inert

        self._stubs = StubFinder()
        torch.classes.neuron = inert("torch.classes.neuron")  # type: ignore[attr-defined]
        for name in ("Neuron", "NxD", "neuronx_distributed"):
            logging.getLogger(name).setLevel(logging.WARNING)

    def find_distributions(self, context: Any) -> Iterable[metadata.Distribution]:
        """Return distributions from which `importlib.metadata` takes the versions of NxDI and of the stand-ins."""
        versions = {**VERSIONS, "neuronx-distributed-inference": self._version()}
        names = versions if context.name is None else [context.name.replace("_", "-").lower()]
        return [_Distribution(name, versions[name]) for name in names if name in versions]

    def _version(self) -> str:
        text = (self._source / "neuronx_distributed_inference" / "_version.py").read_text()
        match = re.search(r'__version__ = "(.*)"', text)
        return match[1] if match else "unknown"


class _Distribution(metadata.Distribution):
    def __init__(self, name: str, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


_NEURON = (
    *("torch_neuronx", "torch_xla", "libneuronxla", "neuronxcc", "nki", "nkilib"),
    *("neuronx_distributed", "neuronx_distributed_inference"),
)


def _change_behind(loader: Any, change: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        change(module)

    loader.exec_module = exec_module
