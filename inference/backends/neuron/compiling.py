"""Compiling ahead of time: the same preparation as loading, without a device in use."""

from __future__ import annotations

from inference.backends.neuron.device_target import compile_target_decoder
from inference.backends.neuron.fused import compile_fused_decoder
from inference.backends.neuron.medusa import compile_medusa_decoder
from inference.backends.neuron.slots import compile_neuron_backend
from inference.config import ModelConfig


def compile_models(target: ModelConfig | None, draft: ModelConfig | None) -> None:
    """Compile what is not compiled yet.

    Raises:
        ConfigError: NxDI is not here, or a model or the settings cannot be used.
    """
    if target is not None and target.neuron.method == "medusa":
        compile_medusa_decoder(target)
        return
    if target is not None and draft is not None and target.neuron.method != "vanilla":
        compile_fused_decoder(target, draft)
        return
    if target is not None and draft is None and target.neuron.device_sampling:
        compile_target_decoder(target)
        return
    for config in (target, draft):
        if config is not None:
            compile_neuron_backend(config)
