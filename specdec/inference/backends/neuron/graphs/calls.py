"""Tensors of one call of an NxDI application, made from rows of tokens.

A row is one slot's part of a call. All rows of a call have the graph's width. Shorter ones are padded at the end; the
padding's keys and values come after all valid ones, and are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.inference.backends.neuron.graphs.medusa_tree import TreePass

PAD_TOKEN_ID = 0
GREEDY = (1.0, 1.0, 1.0)
"""top_k, top_p and temperature of a row whose likeliest token is wanted, or whose token the host chooses."""

SHORT_PROMPT = 2
"""Number of tokens of the longest prompt that must be padded here, not by NxDI; `prompt_call` says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One slot's tokens in a call.

    Attributes:
        slot: where keys and values are written.
        start: position of the first token; the slot holds all tokens before it.
        token_ids: at most as many as the graph is wide.
        sampling: top_k, top_p, temperature.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    sampling: tuple[float, float, float] = GREEDY


def prompt_call(row: Row, *, widest: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a prefill: one slot's prompt, from position 0 and alone in its call.

    NxDI takes every call that has a position 0 for a call of prompts. It pads the positions of a prompt with 1, and
    returns the logits at the highest position, the first of several equal ones. In a prompt of one token that is the
    padding, and in one of two tokens it is the token only because the token comes first. So prompts of these lengths
    are padded here, with position 0, up to the widest prompt graph, where NxDI adds nothing.

    Args:
        row: the whole prompt, with start 0.
        widest: tokens of the widest prompt graph; 0 where prompts are not padded at all.
    """
    num_tokens = len(row.token_ids)
    num_padding = max(0, widest - num_tokens) if num_tokens <= SHORT_PROMPT else 0
    return {
        "input_ids": torch.tensor([[*row.token_ids, *[PAD_TOKEN_ID] * num_padding]]),  # [1, num_tokens + num_padding]
        "position_ids": torch.tensor([[*range(num_tokens), *[0] * num_padding]]),
        "attention_mask": torch.tensor([[1] * num_tokens + [0] * num_padding]),
        "seq_ids": torch.tensor([row.slot]),  # [1]
        "sampling_params": torch.tensor([row.sampling]),  # [1, 3] float32
    }


def continued_call(rows: Sequence[Row], *, width: int) -> dict[str, Any]:
    """Return the tensors of a pass whose rows continue what their slots hold, each padded to `width` tokens.

    Rows must be in the order of their slots. A full batch has a row for each slot; a smaller one may skip slots.
    """
    starts = torch.tensor([row.start for row in rows])[:, None]  # [num_rows, 1]
    padded = [[*row.token_ids, *[PAD_TOKEN_ID] * (width - len(row.token_ids))] for row in rows]
    return {
        "input_ids": torch.tensor(padded),  # [num_rows, width]
        "position_ids": starts + torch.arange(width),
        # NxDI would otherwise take the width for the length of the past.
        "attention_mask": (torch.arange(int(starts.max())) < starts).long(),  # [num_rows, longest past]
        "seq_ids": torch.tensor([row.slot for row in rows]),  # [num_rows]
        "sampling_params": torch.tensor([row.sampling for row in rows]),  # [num_rows, 3] float32
    }


def fused_call(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the tensors of a step of the fused graph, with one token per row; NxDI makes the mask itself."""
    call = continued_call(rows, width=1)
    return {**call, "attention_mask": None}


def medusa_call(
    tree: TreePass, *, start: int, width: int, num_heads: int, sampling: tuple[float, float, float]
) -> dict[str, Any]:
    """Return the tensors of a pass over a token tree, placed after the `start` tokens of slot 0 and padded to `width`.

    Node i is written to position start + i, whatever its depth. `sampling` is top_k, top_p and temperature; top_k is
    the number of token ids that the target and each of the `num_heads` Medusa heads return per node.
    """
    num_padding = width - len(tree.token_ids)
    seen = torch.eye(width, dtype=torch.long)  # [width, width]: which nodes a node sees
    for node in range(len(tree.token_ids)):
        seen[node, tree.ancestors(node)] = 1
    nothing_moves = torch.arange(num_heads + 1)[None]  # NxDI would move keys and values from the first to the second
    return {
        "input_ids": torch.tensor([[*tree.token_ids, *[PAD_TOKEN_ID] * num_padding]]),  # [1, width]
        "position_ids": start + torch.tensor([[*tree.depths, *[0] * num_padding]]),
        "attention_mask": torch.ones(1, start, dtype=torch.long),
        "seq_ids": torch.tensor([0]),
        "sampling_params": torch.tensor([sampling]),
        "medusa_args": (nothing_moves, nothing_moves, seen[None], start + torch.arange(width)[None]),
    }
