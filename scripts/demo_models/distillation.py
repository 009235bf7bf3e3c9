"""Owns the draft's learning from the target: forward KL on corpus rows and on rows the target wrote."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from .architecture import logits_of
from .tokenizer import PAD_ID
from .tokens import MixtureSampler
from .training import Loss


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> Loss:
    """Mean forward KL(target || draft) in nats per token, plus the target's entropy, over rows that are not padding.

    Rows are int64 (rows, length + 1). The constant entropy makes the value a cross-entropy; gradients are the same.
    """

    def loss(rows: torch.Tensor) -> torch.Tensor:
        inputs, kept = rows[:, :-1], (rows[:, 1:] != PAD_ID).flatten()
        with torch.no_grad():
            wanted = torch.softmax(logits_of(target, inputs).float().flatten(0, 1)[kept], -1)
        logits = logits_of(draft, inputs).float().flatten(0, 1)[kept]
        return functional.cross_entropy(logits, wanted)

    return loss


@dataclass
class DistillationSampler:
    """Mixes corpus rows with rows written by the target; `written` is int64 (rows, length)."""

    corpus: MixtureSampler
    written: torch.Tensor
    written_share: float
    seed: int

    def batch(self, step: int, rows: int, length: int) -> torch.Tensor:
        """Return int64 (rows, length + 1); written rows that are shorter are padded, longer ones cut."""
        count = round(rows * self.written_share)
        epoch, first = divmod(step * count, len(self.written) - count)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.written))
        chosen = self.written[torch.from_numpy(order[first : first + count])][:, : length + 1]
        padded = functional.pad(chosen, (0, length + 1 - chosen.shape[1]), value=PAD_ID)
        return torch.cat([padded, self.corpus.batch(step, rows - count, length)])
