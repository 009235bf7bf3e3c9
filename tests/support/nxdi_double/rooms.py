"""How the double's graphs read, write and pad rooms (a sequence's part of the KV cache), and the lengths of graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tests.support.nxdi_double.config import NeuronConfig
from tests.support.nxdi_double.memory import Memory


def read_rooms(config: NeuronConfig, seq_ids: list[int]) -> list[int]:
    """Return the number of the room (part of the KV cache) that each row of a batch reads.

    It is the row's seq_id, but in a full batch the row's own number, as in NxDI.
    """
    full = len(seq_ids) == config.tkg_batch_size
    return list(range(len(seq_ids))) if full else seq_ids


def scatter(
    config: NeuronConfig, memory: Memory, new: torch.Tensor, position_ids: torch.Tensor, seq_ids: list[int]
) -> None:
    """Write each row's new keys and values to the room (part of the KV cache) with the row's seq_id.

    `new` is from `Memory.run`, `position_ids` is [num_rows, width]. As in NxDI, rows that pad a partial batch spoil
    position 0 of all other rooms, unless `apply_seq_ids_mask` is set.
    """
    for row, room in enumerate(seq_ids):
        memory.write(new, row, room, position_ids[row])
    others = [room for room in range(config.tkg_batch_size) if room not in seq_ids]
    if others and not config.apply_seq_ids_mask:
        for room in others:
            memory.soil(room, 0, 1)


def fill(memory: Memory, new: torch.Tensor, room: int, num_tokens: int) -> None:
    """Write the keys and values of a padded prompt to a room (part of the KV cache), from position 0 on.

    `new` is from `Memory.run`, with the prompt as the only row. The first `num_tokens` tokens are the prompt; the
    positions of the padding get NOISE.
    """
    bucket = new.shape[4]
    memory.write(new, 0, room, torch.arange(bucket))
    memory.soil(room, num_tokens, bucket)


def pad_prompt(
    input_ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor, bucket: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad to `bucket` columns: ids and mask with 0, and positions with 1; return the three.

    So, as in NxDI, a padding token has the highest position of a prompt of one token.
    """
    padding = (0, bucket - input_ids.shape[1])
    pad = torch.nn.functional.pad
    return pad(input_ids, padding), pad(mask, padding), pad(position_ids, padding, value=1)


def last_index(position_ids: torch.Tensor) -> torch.Tensor:
    """Return, as [num_rows, 1], the column whose logits a row gives: the first one with the row's highest position."""
    return position_ids.argmax(1, keepdim=True)


def automatic_buckets(longest: int) -> list[int]:
    """Return the lengths for which NxDI compiles graphs by default, for a greatest length of `longest`.

    They are the powers of two from 128 on, up to `longest` / sqrt(2), and `longest` itself.
    """
    return [*(2**i for i in range(7, round(math.log2(longest)))), longest]


def fitting_bucket(buckets: Sequence[int], length: int) -> int:
    """Return the bucket (length for which a graph was compiled) for `length` tokens, as NxDI chooses it.

    It is the first one that is longer than `length`, or the last one if that is just as long.

    Raises:
        ValueError: every bucket is shorter.
    """
    for bucket in buckets:
        if length < bucket:
            return bucket
    if length == buckets[-1]:
        return buckets[-1]
    raise ValueError(f"Input len {length} exceeds largest bucket ({buckets[-1]})")
