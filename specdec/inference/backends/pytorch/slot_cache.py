"""Keys and values of every layer, for a fixed number of sequences.

Owns the memory: one tensor of keys and one of values per layer, reserved once and written in place. Knows nothing of
tokens or masks, nor which positions of a slot are valid: callers read no position that they have not written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.inference.backends.host import lazy_zeros
from specdec.inference.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of the keys and values that one layer keeps per position."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class SlotCache:
    """Memory for the keys and values of `num_slots` sequences of `max_length` positions each.

    Args:
        num_spare: further positions after each slot, for the padding of passes of fixed shapes; never read.

    Attributes:
        keys, values: by layer, a tensor [num_slots, num_kv_heads, max_length + num_spare, dim].
        slot_bytes: bytes of one slot's keys and values in all layers.

    Raises:
        ConfigError: the device has not enough memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        num_spare: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.max_length = max_length

        try:
            # Zeros, because a kernel that reads beyond the mask must not meet NaN: 0 * NaN is NaN.
            rooms = [
                _zeros((num_slots, layer.num_kv_heads, max_length + num_spare, width), dtype, device)
                for layer in layers
                for width in (layer.key_dim, layer.value_dim)
            ]
        except (RuntimeError, MemoryError) as error:
            message = f"{num_slots} slots of {max_length} positions do not fit into the memory of {device}"
            raise ConfigError(message) from error
        # per layer [num_slots, num_kv_heads, max_length + num_spare, dim]
        self.keys = rooms[0::2]
        self.values = rooms[1::2]
        # The same memory as one tensor per slot, [1, num_kv_heads, ..., dim]: indexing costs more than a copy.
        self._slot_keys = [torch.split(keys, 1) for keys in self.keys]
        self._slot_values = [torch.split(values, 1) for values in self.values]
        self.slot_bytes = sum(room[0].nbytes for room in rooms)

    def write(
        self, layer: int, slot: int, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's keys and values, [1, num_kv_heads, num_tokens, dim], in a slot from position `start` on.

        Returns:
            The slot's keys and values [1, num_kv_heads, start + num_tokens, dim], not copied.
        """
        num_tokens = keys.shape[2]
        slot_keys = self._slot_keys[layer][slot]
        slot_values = self._slot_values[layer][slot]
        slot_keys.narrow(2, start, num_tokens).copy_(keys)
        slot_values.narrow(2, start, num_tokens).copy_(values)
        return slot_keys.narrow(2, 0, start + num_tokens), slot_values.narrow(2, 0, start + num_tokens)

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1 from one slot to another."""
        for rooms in (*self._slot_keys, *self._slot_values):
            source = rooms[source_slot].narrow(2, start, end - start)
            rooms[destination_slot].narrow(2, start, end - start).copy_(source)


class SlotCopy:
    """Copying of positions from one slot to another in fixed shapes, for devices that run nothing but graphs.

    Attributes:
        where: the copy's input, which callers write: source slot, destination slot, first position, and the position
            after the last; int64 [4].
    """

    def __init__(self, cache: SlotCache) -> None:
        self._rooms = [*cache.keys, *cache.values]
        device = self._rooms[0].device
        self._all_positions = torch.arange(self._rooms[0].shape[2]).to(device)
        self.where = torch.zeros(4, dtype=torch.long).to(device)

    def run(self) -> torch.Tensor:
        """Copy keys and values of all layers as `where` says, by operations that a graph can record.

        Returns:
            The number of the slot that was written to, int64 [1]: graphs are made of functions that return a tensor.
        """
        where, positions = self.where, self._all_positions
        source, destination = where[0:1], where[1:2]
        is_copied = ((positions >= where[2:3]) & (positions < where[3:4]))[:, None]  # [num_positions, 1]
        for room in self._rooms:
            new = torch.where(is_copied, room.index_select(0, source), room.index_select(0, destination))
            room.scatter_(0, destination[:, None, None, None].expand_as(new), new)
        return destination + 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros that take memory of a CPU only as they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(lazy_zeros(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
