"""Compiling ahead of time: the same preparation as loading, without a device in use."""

from __future__ import annotations

from collections.abc import Iterator

from inference.backends.neuron.application import Compilation
from inference.backends.neuron.device_target import prepare_target
from inference.backends.neuron.fused import prepare_fused
from inference.backends.neuron.medusa import prepare_medusa
from inference.backends.neuron.slots import prepare_slots
from inference.config import ModelConfig


def compile_models(target: ModelConfig | None, draft: ModelConfig | None) -> None:
    """Compile what is not compiled yet.

    Raises:
        ConfigError: NxDI is not here, or a model or the settings cannot be used.
    """
    for compilation in _prepared(target, draft):
        compilation.compiled()


def _prepared(target: ModelConfig | None, draft: ModelConfig | None) -> Iterator[Compilation]:
    if target is not None and target.neuron.method == "medusa":
        yield prepare_medusa(target)[0]
    elif target is not None and draft is not None and target.neuron.method != "vanilla":
        yield prepare_fused(target, draft)[0]
    elif target is not None and draft is None and target.neuron.device_sampling:
        yield prepare_target(target)[0]
    else:
        yield from (prepare_slots(config)[0] for config in (target, draft) if config is not None)
