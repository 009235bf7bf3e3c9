"""Rooms of the KV cache, one per sequence, as the double's graphs read, write and pad them; and bucket lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tests.support.nxdi_double.config import NeuronConfig
from tests.support.nxdi_double.memory import Memory


def read_rooms(config: NeuronConfig, seq_ids: list[int]) -> list[int]:
    """Return the KV-cache room that each row of a batch reads: its seq_id, or in a full batch its row, as in NxDI."""
    full = len(seq_ids) == config.tkg_batch_size
    return list(range(len(seq_ids))) if full else seq_ids


def scatter(
    config: NeuronConfig, memory: Memory, new: torch.Tensor, position_ids: torch.Tensor, seq_ids: list[int]
) -> None:
    """Write each row's keys and values to room seq_ids[row]; unmasked padding spoils position 0 of the other rooms."""
    for row, room in enumerate(seq_ids):
        memory.write(new, row, room, position_ids[row])
    others = [room for room in range(config.tkg_batch_size) if room not in seq_ids]
    if others and not config.apply_seq_ids_mask:
        for room in others:
            memory.soil(room, 0, 1)


def fill(memory: Memory, new: torch.Tensor, room: int, num_tokens: int) -> None:
    """Write a padded prompt to a room from position 0 on, to its bucket's end; the padding is noise."""
    bucket = new.shape[4]
    memory.write(new, 0, room, torch.arange(bucket))
    memory.soil(room, num_tokens, bucket)


def pad_prompt(
    input_ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor, bucket: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad ids and mask with 0 and positions with 1, so that a prompt of one token gets the logits of the padding."""
    padding = (0, bucket - input_ids.shape[1])
    pad = torch.nn.functional.pad
    return pad(input_ids, padding), pad(mask, padding), pad(position_ids, padding, value=1)


def last_index(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the column of each prompt's logits, the first with the highest position: [num_rows, 1]."""
    return position_ids.argmax(1, keepdim=True)


def automatic_buckets(longest: int) -> list[int]:
    """Return bucket lengths: powers of two from 128 on, of which `longest` replaces the last, the one nearest to it."""
    return [*(2**i for i in range(7, round(math.log2(longest)))), longest]


def fitting_bucket(buckets: Sequence[int], length: int) -> int:
    """Return the first bucket that is longer than `length`; the last bucket may also be just as long.

    Raises:
        ValueError: no bucket is long enough.
    """
    for bucket in buckets:
        if length < bucket:
            return bucket
    if length == buckets[-1]:
        return buckets[-1]
    raise ValueError(f"Input len {length} exceeds largest bucket ({buckets[-1]})")
