"""Installation of the double under NxDI's names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tests.support.nxdi_double import config, fused, models

if TYPE_CHECKING:
    import pytest

N = "neuronx_distributed_inference"

MODULES: dict[str, dict[str, Any]] = {
    "torch_neuronx": {"__version__": "2.9.0"},
    "torch_neuronx.xla_impl": {},
    "torch_neuronx.utils": {"get_platform_target": lambda: "trn1"},
    N: {},
    f"{N}.models": {},
    f"{N}.models.config": {
        name: getattr(config, name)
        for name in ("NeuronConfig", "InferenceConfig", "FusedSpecNeuronConfig", "OnDeviceSamplingConfig")
    },
    f"{N}.models.model_base": {"NeuronFusedSpecModel": fused.NeuronFusedSpecModel},
    **models.modules(f"{N}.models"),
    f"{N}.utils": {},
    f"{N}.utils.hf_adapter": {"load_pretrained_config": config.load_pretrained_config},
}


def install(patch: pytest.MonkeyPatch) -> None:
    """Make the double importable under NxDI's names, until the patch is undone."""
    for name, contents in MODULES.items():
        module = ModuleType(name)
        module.__path__ = []  # a package, as far as the import of its children is concerned
        module.__dict__.update(contents)
        patch.setitem(sys.modules, name, module)


def write_packages(folder: Path) -> Path:
    """Write the double as packages, for other processes' PYTHONPATH, on which `tests` must be too."""
    for name in MODULES:
        package = folder.joinpath(*name.split("."))
        package.mkdir(parents=True, exist_ok=True)
        text = "from tests.support.nxdi_double.install import MODULES\n\nglobals().update(MODULES[__name__])\n"
        (package / "__init__.py").write_text(text)
    return folder
