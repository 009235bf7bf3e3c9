"""Decoder of a target without a draft whose tokens the device chooses: the baseline of fused pairs that do so too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.inference.backends.neuron.backend import checked_config
from specdec.inference.backends.neuron.decoders.device_decoder import DeviceDecoder
from specdec.inference.backends.neuron.graphs.application import Compilation, slot_compilation
from specdec.inference.backends.neuron.graphs.calls import Row, continued_call
from specdec.inference.backends.neuron.graphs.settings import device_top_k, target_arguments
from specdec.inference.backends.neuron.graphs.shape import SlotShape, slot_shape
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError
from specdec.inference.model.decoder import Turn, Verdict


class TargetDecoder(DeviceDecoder):
    """Decoder of one token per sequence and step; it ignores proposed draft tokens."""

    def _read_prompt(self, turn: Turn) -> Verdict:
        return _verdict(self._prompted(turn, self._device_sampling(turn.sampling)).tokens)

    def _advance(self, turns: Sequence[Turn]) -> dict[int, Verdict]:
        rows = [Row(turn.slot, turn.start, turn.token_ids[-1:], self._device_sampling(turn.sampling)) for turn in turns]
        tokens = self._application.forward(**continued_call(rows, width=1)).tokens  # [num_rows] or [num_rows, 1]
        for turn in turns:
            self._held[turn.slot] = turn.start + 1
        return {turn.slot: _verdict(of_row) for turn, of_row in zip(turns, tokens, strict=True)}


def _verdict(token: torch.Tensor) -> Verdict:
    return Verdict((int(token.reshape(())),), num_draft_tokens=0, num_accepted_tokens=0)


def load_target_decoder(target: ModelConfig, draft: ModelConfig | None) -> TargetDecoder:
    """Load a target; compile it first if the store has no compiled model.

    Raises:
        ConfigError: a draft is given too, NxDI is missing, or the checkpoint or the settings cannot be used.
    """
    if draft is not None:
        raise ConfigError("device_sampling does not go with speculation_method vanilla and a draft: the host verifies")
    compilation, shape = prepare_target(target)
    max_top_k = device_top_k(compilation.arguments)
    return TargetDecoder(compilation.load(), shape, method="target with --device_sampling", max_top_k=max_top_k)


def prepare_target(target: ModelConfig) -> tuple[Compilation, SlotShape]:
    """Check the configuration; return its compilation and the limits of the compiled model."""
    model_config, length = checked_config(target)
    arguments = target_arguments(target, length=length)
    return slot_compilation(target, model_config, arguments), slot_shape(model_config, arguments)
