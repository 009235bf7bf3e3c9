"""Medusa in the double: the heads' token ids, and what one pass does to the memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.nxdi_double.config import NeuronConfig
from tests.support.nxdi_double.memory import Memory


class Heads:
    """The contents of medusa_heads.pt: per head a residual layer and an output layer of its own."""

    def __init__(self, checkpoint: Path, num_heads: int) -> None:
        state = torch.load(checkpoint / "medusa_heads.pt", weights_only=True)
        names = ("0.linear.weight", "0.linear.bias", "1.weight")
        self._layers = [[state[f"medusa_head_{head}.{name}"] for name in names] for head in range(num_heads)]

    def logits(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of every head; `hidden` is [..., hidden_size]."""
        return [
            (hidden + torch.nn.functional.silu(hidden @ weight.T + bias)) @ output.T
            for weight, bias, output in self._layers
        ]


def best_ids(target: torch.Tensor, hidden: torch.Tensor, heads: Heads, config: NeuronConfig) -> SimpleNamespace:
    """Return token ids [1 + num_heads, ..., global_topk], likeliest first: the graph's only output."""
    stacked = torch.stack([target, *heads.logits(hidden)])
    return SimpleNamespace(logits=None, hidden_states=stacked.topk(_num_ids(target, config), dim=-1).indices.int())


def _num_ids(logits: torch.Tensor, config: NeuronConfig) -> int:
    return min(int(config.on_device_sampling_config.global_topk), logits.shape[-1])


def run_tree(
    memory: Memory, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, medusa_args: Any
) -> torch.Tensor:
    """Return logits [1, width, vocab_size] of a tree; the scatter index places its keys and values.

    The move of accepted lines is seen by this pass and lost after it, as in NxDI.
    """
    (accepted, current, tree_mask, scatter), width = medusa_args, input_ids.shape[1]
    if tree_mask.shape != (1, width, width) or scatter.shape != (1, width):
        raise RuntimeError(f"medusa_mask {tree_mask.shape} and scatter_index {scatter.shape} for {width} nodes")
    before = memory.rooms.clone()
    memory.rooms[:, :, 0, :, current[0].long()] = before[:, :, 0, :, accepted[0].long()]
    logits, new = memory.run(input_ids, position_ids, mask, [0], tree_mask[0])
    memory.rooms = before
    memory.write(new, 0, 0, scatter[0].long())
    return logits
