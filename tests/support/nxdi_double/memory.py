"""A model with the KV cache of a compiled graph.

Each sequence has a room, its part of the cache; writes go to given positions, and a mask says which positions are read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

NOISE = 50.0
"""Value of keys and values at positions without a token; if they are read by mistake, every logit is wrong."""


class Memory:
    """A model and its KV cache, which has B rooms (one per sequence) of L positions each.

    Args:
        checkpoint: directory of a Transformers model.
        num_rooms, length: number of rooms (B), and number of positions of each (L).
    """

    def __init__(self, checkpoint: Path, *, num_rooms: int, length: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, num_rooms, config.num_key_value_heads, length, head_dim)
        self.rooms = torch.full(shape, NOISE)

    @torch.inference_mode()
    def run(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, rooms: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model; return the logits [num_rows, width, vocab_size] and the new tokens' keys and values.

        The latter are [num_layers, 2 (keys, values), num_rows, num_heads, width, head_dim].

        Each token sees the cached positions that `mask` selects, and the new tokens up to itself. Nothing is written.

        Args:
            mask: bool [num_rows, at most L]; for each row, which positions of its room are visible.
            rooms: number of the room that each row reads.
        """
        num_rows, width = input_ids.shape
        past = self.rooms[:, :, rooms]  # [layers, 2, num_rows, heads, L, head_dim]
        length = past.shape[4]
        seen = torch.zeros(num_rows, 1, width, length + width, dtype=torch.bool)
        seen[..., : mask.shape[1]] = mask[:, None, None, :].bool()
        seen[..., length:] = torch.ones(width, width).tril().bool()
        cache = DynamicCache()
        for layer in range(past.shape[0]):
            cache.update(past[layer, 0], past[layer, 1], layer)
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        output = self.model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=bias, past_key_values=cache, use_cache=True
        )
        new = torch.stack([torch.stack([layer.keys, layer.values])[..., length:, :] for layer in cache.layers])
        return output.logits.float(), new

    def write(self, new: torch.Tensor, row: int, room: int, positions: torch.Tensor) -> None:
        """Write the keys and values of row `row` to positions of a room; `new` has all rows, as `run` returns them.

        Raises:
            IndexError: a position is beyond the room's end.
        """
        self.rooms[:, :, room, :, positions] = new[:, :, row]

    def soil(self, room: int, start: int, end: int) -> None:
        """Overwrite positions `start` to `end` - 1 of a room (one sequence's KV cache) with NOISE, as padding does."""
        self.rooms[:, :, room, :, start:end] = NOISE
