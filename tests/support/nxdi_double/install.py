"""Makes the double (stand-in) of NxDI importable under NxDI's module names."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tests.support.nxdi_double import config, fused
from tests.support.nxdi_double.application import NeuronApplication

if TYPE_CHECKING:
    import pytest

N = "neuronx_distributed_inference"
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
MODULES: dict[str, dict[str, Any]] = {
    "torch_neuronx": {"__version__": "2.9.0"},
    "torch_neuronx.xla_impl": {},
    "torch_neuronx.utils": {"get_platform_target": lambda: "trn1"},
    N: {},
    f"{N}.models": {},
    f"{N}.models.config": {"FusedSpecNeuronConfig": config.FusedSpecNeuronConfig},
    f"{N}.models.model_base": {"NeuronFusedSpecModel": fused.NeuronFusedSpecModel},
    **{f"{N}.models.{kind}": {} for kind in FAMILIES},
    **{
        f"{N}.models.{kind}.modeling_{kind}": {
            f"Neuron{family}ForCausalLM": type(f"Neuron{family}ForCausalLM", (NeuronApplication,), {})
        }
        for kind, family in FAMILIES.items()
    },
    f"{N}.utils": {},
    f"{N}.utils.hf_adapter": {"load_pretrained_config": config.load_pretrained_config},
}


def install(patch: pytest.MonkeyPatch) -> None:
    """Make the double of NxDI importable under NxDI's module names, until the patch is undone."""
    for name, contents in MODULES.items():
        module = ModuleType(name)
        module.__path__ = []  # a package, as far as the import of its children is concerned
        module.__dict__.update(contents)
        patch.setitem(sys.modules, name, module)
