"""The backend over transformers-neuronx, AWS's older library, with a stand-in for that library."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specdec.inference.backends.registry import load_backend
from specdec.inference.config import ModelConfig, NeuronOptions
from specdec.inference.errors import ConfigError
from tests.support.backend_contract import MAX_LENGTH, Move, assert_matches, reference
from tests.support.neuron.slot_models import GAMMA, checkpoint
from tests.support.nxdi_double.memory import Memory

TOKENS = tuple(range(20, 20 + MAX_LENGTH))
K = GAMMA + 1


class LlamaForSampling:
    """Stand-in for transformers-neuronx's class, for one sequence.

    Logits are [1, V], where V is the size of the vocabulary, or [k, V, 1] for a pass over k tokens.
    """

    def __init__(self, path: str, length: int) -> None:
        self._memory = Memory(Path(path), num_rooms=1, length=length)
        self._widths: list[int] = []
        self._compiled = False

    @classmethod
    def from_pretrained(
        cls, path: str, *, batch_size: int, tp_degree: int, n_positions: int, amp: str
    ) -> LlamaForSampling:
        assert (batch_size, tp_degree, amp) == (1, 2, "f32")
        return cls(path, n_positions)

    def enable_speculative_decoder(self, width: int) -> None:
        assert not self._compiled
        self._widths.append(width)

    def to_neuron(self) -> None:
        self._compiled = True

    def __call__(self, input_ids: torch.Tensor, cache_ids: torch.Tensor, start_ids: torch.Tensor) -> torch.Tensor:
        return self._run(input_ids, cache_ids, start_ids)[:, -1]

    def speculative_forward(
        self, input_ids: torch.Tensor, cache_ids: torch.Tensor, start_ids: torch.Tensor, speculation_length: int
    ) -> torch.Tensor:
        assert speculation_length in self._widths
        assert input_ids.shape[1] == speculation_length
        return self._run(input_ids, cache_ids, start_ids).permute(1, 2, 0)

    def _run(self, input_ids: torch.Tensor, cache_ids: torch.Tensor, start_ids: torch.Tensor) -> torch.Tensor:
        assert self._compiled
        assert start_ids.tolist() == [0]
        assert cache_ids.dtype == torch.int32
        seen = torch.ones(1, int(cache_ids[0]))
        logits, new = self._memory.run(input_ids, cache_ids[None].long(), seen, [0])
        self._memory.write(new, 0, 0, cache_ids.long())
        return logits


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers_neuronx", "transformers_neuronx.llama", "transformers_neuronx.llama.model"):
        module: Any = ModuleType(name)
        module.__path__ = []
        module.LlamaForSampling = LlamaForSampling
        monkeypatch.setitem(sys.modules, name, module)


def config(path: Path, *, num_slots: int = 1, **options: Any) -> ModelConfig:
    neuron = NeuronOptions(**{"tp_degree": 2, "gamma": GAMMA, **options})
    return ModelConfig(
        path,
        backend="transformers-neuronx",
        dtype="float32",
        sequence_length=MAX_LENGTH + K,
        num_slots=num_slots,
        neuron=neuron,
    )


@pytest.mark.parametrize("gamma", [0, GAMMA])
def test_logits_are_those_of_transformers(gamma: int) -> None:
    backend = load_backend(config(checkpoint("llama"), gamma=gamma))
    history = [
        [Move(0, 0, TOKENS[:7], 0.5)],
        [Move(0, 1, TOKENS[8:9], 1)],
        [Move(0, 0.5, TOKENS[9:15], 1)],
        [Move(0, 0, TOKENS[:1], 1)],
    ]
    assert_matches(backend, reference("llama"), history, tolerance=1e-3)


def test_unsupported_parameters_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="use --batch 1, not 2"):
        load_backend(config(checkpoint("llama"), num_slots=2))
    with pytest.raises(ConfigError, match=r"Qwen3.* is not supported by backend transformers-neuronx"):
        load_backend(config(checkpoint("qwen3")))
    with pytest.raises(ConfigError, match="speculation_method fused needs backend neuron"):
        load_backend(config(checkpoint("llama"), method="fused"))
    with pytest.raises(ConfigError, match="compile never: transformers-neuronx keeps a cache of its own"):
        load_backend(replace(config(checkpoint("llama")), compile_policy="never"))
    with pytest.raises(ConfigError, match="neuron_config is NxDI's"):
        load_backend(config(checkpoint("llama"), overrides={"fused_qkv": True}))
