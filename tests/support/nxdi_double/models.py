"""Classes of models, under NxDI's names of modules."""

from __future__ import annotations

from typing import Any

from tests.support.nxdi_double.application import NeuronApplication

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}


def modules(parent: str) -> dict[str, dict[str, Any]]:
    """Return the contents of one module per family of models, by the module's name below `parent`."""
    made: dict[str, dict[str, Any]] = {}
    for kind, family in FAMILIES.items():
        name = f"Neuron{family}ForCausalLM"
        made[f"{parent}.{kind}"] = {}
        made[f"{parent}.{kind}.modeling_{kind}"] = {name: type(name, (NeuronApplication,), {})}
    return made
