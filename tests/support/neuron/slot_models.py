"""Neuron backends that keep each sequence in its part (slot) of a KV cache, in the sizes of the backend tests."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from specdec.inference.backends.neuron.backend import NeuronBackend, load_neuron_backend
from specdec.inference.config import ModelConfig, NeuronOptions
from tests.support.backend_contract import MAX_LENGTH, NUM_SLOTS
from tests.support.models import save_tiny_model

GAMMA = 3


@lru_cache(maxsize=4)
def checkpoint(family: str, **fields: Any) -> Path:
    """Return the directory of a family's tiny model with further fields of its configuration.

    It is saved at the first call with these arguments.
    """
    return save_tiny_model(Path(mkdtemp()) / family, family, **fields)


def neuron_config(path: Path, *, gamma: int = GAMMA, length: int = MAX_LENGTH, **options: Any) -> ModelConfig:
    """Return settings of a float32 model on backend neuron, with three sequences of `length` tokens each.

    The context has room for `gamma` + 1 more tokens, unless `gamma` is 0. Further settings come from `options`:
    num_slots, compile_policy, or fields of `NeuronOptions`.
    """
    num_slots, policy = options.pop("num_slots", NUM_SLOTS), options.pop("compile_policy", "auto")
    return ModelConfig(
        path,
        backend="neuron",
        dtype="float32",
        sequence_length=length + (gamma + 1 if gamma else 0),
        num_slots=num_slots,
        compile_policy=policy,
        neuron=NeuronOptions(gamma=gamma, **options),
    )


def slot_backend(family: str = "llama", *, gamma: int = GAMMA) -> NeuronBackend:
    return load_neuron_backend(neuron_config(checkpoint(family), gamma=gamma))
