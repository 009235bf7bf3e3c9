"""Distillation of the target into the draft: forward KL on corpus rows, plain loss on the target's own text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from .architecture import logits_of
from .schedule import Stage
from .tokenizer import PAD_ID
from .tokens import MixtureSampler
from .training import Loss

# Of every CYCLE steps this many are on the target's own text, because that is where the draft is used.
CYCLE, WRITTEN_STEPS = 5, 4


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, written_length: int) -> Loss:
    """Return the draft's cross-entropy against the target, in nats per token; rows are int64 (rows, length + 1).

    On corpus rows the target's whole distribution is the label (forward KL plus the target's constant entropy). Rows
    of `written_length` tokens are the target's own choices, so the token itself is the label, which costs no pass of
    the target.
    """

    def loss(rows: torch.Tensor) -> torch.Tensor:
        kept = (rows[:, 1:] != PAD_ID).flatten()
        logits = logits_of(draft, rows[:, :-1]).float().flatten(0, 1)[kept]
        if rows.shape[1] == written_length:
            return functional.cross_entropy(logits, rows[:, 1:].flatten()[kept])
        with torch.no_grad():
            wanted = torch.softmax(logits_of(target, rows[:, :-1]).float().flatten(0, 1)[kept], -1)
        return functional.cross_entropy(logits, wanted)

    return loss


@dataclass
class DistillationSampler:
    """Sampler that alternates batches of rows by the target, int64 (rows, written length), with corpus batches."""

    corpus: MixtureSampler
    written: torch.Tensor
    seed: int

    def batch(self, step: int, stage: Stage) -> torch.Tensor:
        """Return corpus rows, int64 (stage.rows, stage.length + 1), or written rows of about as many tokens."""
        cycle, phase = divmod(step, CYCLE)
        if phase >= WRITTEN_STEPS:
            return self.corpus.batch(cycle * (CYCLE - WRITTEN_STEPS) + phase - WRITTEN_STEPS, stage)
        count = stage.rows * stage.length // self.written.shape[1]
        first = (cycle * WRITTEN_STEPS + phase) * count
        epoch, offset = divmod(first, len(self.written) - count)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.written))
        return self.written[torch.from_numpy(order[offset : offset + count])]
