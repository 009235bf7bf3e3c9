"""Checks for Neuron devices: whether TorchNeuron, PyTorch's backend for them, is installed, and whether cores suffice.

Backends torch and neuron share these functions. A package of Neuron's is imported only when a function needs it.
"""

from __future__ import annotations

import importlib
import logging
import os
from importlib import metadata
from types import ModuleType

from specdec.inference.errors import ConfigError

logger = logging.getLogger(__name__)

REMEDY = (
    "run inside a Neuron virtual environment of a Deep Learning AMI or container, or install from AWS's own Neuron "
    "package index (docs/neuron.md)"
)
TORCH_NEURONX = "torch-neuronx"
DEVICE = "neuron"
"""Name of the device, and of the compiler, that TorchNeuron adds to PyTorch."""
OLDEST_TORCH_NEURON = (2, 10)
"""First release of torch-neuronx that is TorchNeuron; those up to 2.9 are for PyTorch/XLA, as NxD Inference needs."""
VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"


def require_torch_neuron() -> None:
    """Raise ConfigError unless TorchNeuron, PyTorch's backend for Neuron devices, is installed."""
    if release_of(TORCH_NEURONX) < OLDEST_TORCH_NEURON:
        raise ConfigError(
            f"device {DEVICE} needs TorchNeuron, which is {TORCH_NEURONX} 2.13 or newer, of Neuron SDK 2.33 or later; "
            f"the version in this Python is {version_of(TORCH_NEURONX)} (docs/torchneuron.md)"
        )
    load_module("torch_neuronx")


def version_of(package: str) -> str:
    """Return the version of a package; "unknown" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def release_of(package: str) -> tuple[int, ...]:
    """Return major and minor version of an installed package; () where they are unknown."""
    return tuple(int(part) for part in version_of(package).split(".")[:2] if part.isdigit())


def load_module(name: str) -> ModuleType:
    """Import a module of a Neuron package.

    Raises:
        ConfigError: the module cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # placeholders and incomplete packages raise errors of any type
        raise ConfigError(f"backend neuron: {name} cannot be imported ({error}): {REMEDY}") from error


def take_cores(cores: str | None, tp_degree: int) -> None:
    """Make this process take the given NeuronCores; call this before its Neuron runtime starts.

    If neither `cores` nor the environment says which cores to take, the process takes every core, and logs a warning.

    Args:
        cores: list of cores, such as 0-3,8; None leaves the choice to the environment.
        tp_degree: number of cores that the model is split over.

    Raises:
        ConfigError: `cores`, or else NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES of the environment, gives fewer
            cores than tp_degree, or cannot be read.
    """
    if cores is not None:
        os.environ[VISIBLE_CORES] = cores
    visible, number = os.environ.get(VISIBLE_CORES), os.environ.get("NEURON_RT_NUM_CORES")
    if visible is None and number is None:
        logger.warning("%s is not set: this process takes every NeuronCore of the instance", VISIBLE_CORES)
        return
    name, text = ("NEURON_RT_NUM_CORES", number) if visible is None else (VISIBLE_CORES, visible)
    num_cores = _count(name, str(text), is_list=visible is not None)
    if num_cores < tp_degree:
        raise ConfigError(f"{name}={text} gives {num_cores} NeuronCores, tp_degree {tp_degree} needs as many")


def _count(name: str, text: str, *, is_list: bool) -> int:
    """Return how many cores the value `text` of the environment variable `name` gives.

    Args:
        is_list: True if `text` is a list such as 0-3,8; False if it is a number.

    Raises:
        ConfigError: `text` is neither.
    """
    try:
        if not is_list:
            return int(text)
        bounds = [[int(end) for end in part.split("-")] for part in text.split(",")]
        return sum(part[-1] - part[0] + 1 for part in bounds)
    except ValueError as error:
        raise ConfigError(f"{name}={text} cannot be read: a list such as 0-3,8 or a number is expected") from error
