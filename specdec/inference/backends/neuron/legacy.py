"""Backend of transformers-neuronx, NxDI's predecessor, for Inf2 and Trn1 on SDK 2.26.

AWS's support ended on 2025-09-16. Only Llama is served, one sequence at a time, by `NeuronBackend`, the same class as
over NxDI.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from specdec.inference.backends.architectures import architecture_name
from specdec.inference.backends.devices import load_module, take_cores
from specdec.inference.backends.neuron.backend import NeuronBackend, checked_config
from specdec.inference.backends.neuron.environment import require_transformers_neuronx
from specdec.inference.backends.neuron.graphs.settings import DEFAULT_DTYPE, verification_width
from specdec.inference.backends.neuron.graphs.shape import slot_shape
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError, UnsupportedModelError

AMP = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class LegacyApplication:
    """Adapter that lets `NeuronBackend` call a LlamaForSampling of transformers-neuronx as an NxDI application.

    In transformers-neuronx positions are called cache_ids, slots start_ids, and logits are transposed.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def forward(self, **tensors: torch.Tensor) -> SimpleNamespace:
        """Run the model over `input_ids` at `position_ids`, both [1, width], in the slot `seq_ids`, [1].

        Returns:
            An object with `logits`: [1, 1, vocab_size] of a prompt's last token, [1, width, vocab_size] of a pass.
        """
        input_ids, position_ids = tensors["input_ids"], tensors["position_ids"]  # [1, width]
        ids = {"cache_ids": position_ids[0].int(), "start_ids": tensors["seq_ids"].int()}
        width = input_ids.shape[1]
        if position_ids.min() == 0 or width == 1:
            return SimpleNamespace(logits=self._model(input_ids, **ids).reshape(1, 1, -1))
        logits = self._model.speculative_forward(input_ids, speculation_length=width, **ids)  # [width, vocab_size, 1]
        return SimpleNamespace(logits=logits.permute(2, 0, 1))


def load_legacy_backend(config: ModelConfig) -> NeuronBackend:
    """Load a Llama checkpoint through transformers-neuronx, which compiles it and keeps its own cache.

    Raises:
        ConfigError: the package is missing, or the checkpoint or the settings cannot be used.
    """
    model_config, length = checked_config(config)
    _check(config, str(model_config.model_type), architecture_name(model_config))
    take_cores(config.neuron.cores, config.neuron.tp_degree)
    dtype, width = DEFAULT_DTYPE if config.dtype == "auto" else config.dtype, verification_width(config.neuron.gamma)
    arguments = {"seq_len": length, "max_context_length": length, "batch_size": 1, "speculation_length": width}
    shape = replace(slot_shape(model_config, {**arguments, "torch_dtype": dtype}), prompt_width=0)
    require_transformers_neuronx()
    llama = load_module("transformers_neuronx.llama.model").LlamaForSampling
    model = llama.from_pretrained(
        str(config.path), batch_size=1, tp_degree=config.neuron.tp_degree, n_positions=length, amp=AMP[dtype]
    )
    if width:
        model.enable_speculative_decoder(width)
    model.to_neuron()
    return NeuronBackend(LegacyApplication(model), shape)


def _check(config: ModelConfig, model_type: str, name: str) -> None:
    if model_type != "llama":
        raise UnsupportedModelError(f"{name} is not supported by backend transformers-neuronx: llama is")
    if config.num_slots != 1:
        raise ConfigError(f"backend transformers-neuronx serves one sequence: use --batch 1, not {config.num_slots}")
    if config.neuron.overrides:
        raise ConfigError("neuron_config is NxDI's: backend transformers-neuronx takes none")
    if config.compile_policy != "auto":
        raise ConfigError(f"compile {config.compile_policy}: transformers-neuronx keeps a cache of its own")
    if config.neuron.method != "vanilla":
        raise ConfigError(f"speculation_method {config.neuron.method} needs backend neuron, not transformers-neuronx")
