"""Checks that this Python can drive a Neuron device through NxD Inference or its predecessor.

Placeholders on PyPI have taken the names of all Neuron packages: some raise at import, some cannot be imported under
the package's name. So each check looks for a module that only the real package has. A package that is installed
without that module is a placeholder.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

from specdec.inference.backends.devices import (
    OLDEST_TORCH_NEURON,
    REMEDY,
    TORCH_NEURONX,
    load_module,
    release_of,
    version_of,
)
from specdec.inference.errors import ConfigError

NXDI = "neuronx-distributed-inference"
VERSIONS = (NXDI, "neuronx-distributed", "torch-neuronx", "neuronx-cc")
FORMAT = 2
"""Version of what this project adds to NxDI's graphs. Raise it when the same settings compile to another graph."""
OLDEST_NXDI = (0, 7)
"""Oldest supported release of NxDI, that of SDK 2.27: its interfaces were checked from this release on."""
IMAGE = "public.ecr.aws/neuron/pytorch-inference-neuronx:2.9.0-neuronx-py312-sdk2.29.1-ubuntu24.04"
LAST_IMAGE = "public.ecr.aws/neuron/pytorch-inference-neuronx:2.9.0-neuronx-py312-sdk2.31.1-ubuntu24.04"
"""The last image with NxDI, and the only one that starts on a host with the driver of SDK 2.31 or later."""
FP8_ENVIRONMENT = {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}
"""Environment variables with the values that NxDI needs for fp8."""
COMPILER_ENVIRONMENT = (
    "NEURON_CC_FLAGS",
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "NEURON_RT_VIRTUAL_CORE_SIZE",
    *FP8_ENVIRONMENT,
)
"""Environment variables on which a compiled model depends."""


def require_nxdi() -> None:
    """Raise ConfigError unless a supported release of NxD Inference and its torch-neuronx can be imported.

    Placeholders from PyPI that bear these names are refused too.
    """
    _require_xla()
    _require_package(NXDI, "neuronx_distributed_inference.models.config")
    if () < release_of(NXDI) < OLDEST_NXDI:
        oldest = ".".join(map(str, OLDEST_NXDI))
        raise ConfigError(
            f"backend neuron needs NxD Inference {oldest} or newer, this Python has {version_of(NXDI)}, of Neuron SDK "
            f"2.26 or older: take an image of a later SDK, such as {IMAGE}"
        )


def toolchain() -> dict[str, Any]:
    """Return what a compiled model depends on beside its settings: versions of Neuron's packages and of our graphs.

    The result has `versions`, by package, and `format`, the number `FORMAT`.
    """
    return {"format": FORMAT, "versions": {package: version_of(package) for package in VERSIONS}}


def require_transformers_neuronx() -> None:
    """Raise ConfigError unless the legacy transformers-neuronx can be imported."""
    _require_xla()
    _require_package("transformers-neuronx", "transformers_neuronx.llama.model")


def _require_xla() -> None:
    """Raise ConfigError unless the torch-neuronx for PyTorch/XLA is installed."""
    if release_of(TORCH_NEURONX) >= OLDEST_TORCH_NEURON:
        found = f"{TORCH_NEURONX} {version_of(TORCH_NEURONX)}"
        raise ConfigError(
            f"backend neuron: {found} is TorchNeuron, on which NxD Inference does not run: take an image of Neuron "
            f"SDK 2.31, {LAST_IMAGE}: older ones do not start on its driver, nor on later ones (docs/neuron.md)"
        )
    _require_package(TORCH_NEURONX, "torch_neuronx.xla_impl")


def _require_package(package: str, probe_module: str) -> None:
    """Raise ConfigError unless a package has `probe_module`, a module that placeholders lack."""
    try:
        importlib.import_module(probe_module)
    except Exception as error:  # a placeholder raises errors of any type
        # A placeholder may raise at import, or have no module at all.
        if version_of(package) != "unknown" or _is_found(probe_module.partition(".")[0]):
            reason = f"what is installed as {package} is a placeholder from PyPI, or incomplete"
            raise ConfigError(f"backend neuron: {reason}: no {probe_module} ({error}): {REMEDY}") from error
        raise ConfigError(f"backend neuron needs {package} ({error}): {REMEDY}") from error


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: a loaded module without a spec, such as one made by code
        return module in sys.modules


def set_fp8_environment() -> None:
    """Set the variables that fp8 needs; call this before any Neuron package is imported.

    Raises:
        ConfigError: a variable has another value already.
    """
    for name, value in FP8_ENVIRONMENT.items():
        if os.environ.setdefault(name, value) != value:
            raise ConfigError(f"fp8 needs {name}={value}, the environment has {os.environ[name]}")


def check_logical_cores(overrides: Mapping[str, object]) -> None:
    """Refuse a logical NeuronCore size in neuron_config that the environment contradicts.

    NxDI would follow the environment, and ignore neuron_config.

    Args:
        overrides: the user's arguments of NeuronConfig.

    Raises:
        ConfigError: the sizes differ; the message names both.
    """
    wanted = overrides.get("logical_nc_config")
    for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"):
        if wanted is not None and os.environ.get(name, str(wanted)) != str(wanted):
            raise ConfigError(f"neuron_config: logical_nc_config {wanted} contradicts {name}={os.environ[name]}")


def compiler_environment() -> dict[str, str]:
    """Return what a compiled model depends on beside its settings and versions: compiler variables, kind of device."""
    found = {name: os.environ[name] for name in COMPILER_ENVIRONMENT if name in os.environ}
    try:
        found["platform"] = str(load_module("torch_neuronx.utils").get_platform_target())
    except Exception:  # no device, or a version without this function
        found["platform"] = "unknown"
    return found
