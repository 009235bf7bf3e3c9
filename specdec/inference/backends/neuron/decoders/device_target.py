"""Decoder of a target alone, without a draft, where the device chooses the tokens.

Measurements use it as the baseline of pairs (target and draft) whose tokens the device chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.inference.backends.neuron.backend import checked_config
from specdec.inference.backends.neuron.decoders.device_decoder import DeviceDecoder
from specdec.inference.backends.neuron.graphs.application import Compilation, slot_compilation
from specdec.inference.backends.neuron.graphs.calls import Row, continued_call
from specdec.inference.backends.neuron.graphs.settings import target_arguments
from specdec.inference.config import ModelConfig
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


def target_compilation(target: ModelConfig) -> Compilation:
    """Check the configuration of a target; return what compiles and loads its graphs, for prompts and for one token.

    Raises:
        ConfigError: the model or the settings cannot be used.
    """
    model_config, length = checked_config(target)
    return slot_compilation(target, model_config, target_arguments(target, length=length))
