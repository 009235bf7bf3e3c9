"""Text that the target writes itself: batches of greedy and sampled continuations for distillation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from .tokenizer import PAD_ID


@dataclass(frozen=True)
class Request:
    """Batch of prompts of equal length, int64 (rows, prompt length); temperature 0 means greedy."""

    prompts: torch.Tensor
    temperature: float


def generate(model: LlamaForCausalLM, request: Request, length: int) -> torch.Tensor:
    """Continue every prompt to `length` tokens; return int64 (rows, length), padded after an end of text."""
    sampling = {"do_sample": True, "temperature": request.temperature, "top_k": 0}
    with torch.inference_mode():
        rows: torch.Tensor = model.generate(
            request.prompts,
            attention_mask=torch.ones_like(request.prompts),
            max_length=length,
            pad_token_id=PAD_ID,
            **(sampling if request.temperature > 0 else {"do_sample": False}),
        )
    padded = torch.full((len(rows), length), PAD_ID, dtype=torch.int64)
    padded[:, : rows.shape[1]] = rows
    return padded


def prompts_of(tokenizer: Tokenizer, documents: list[str], length: int) -> torch.Tensor:
    """Return the first `length` tokens, bos included, of every long enough document; int64 (rows, length)."""
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(documents)]
    return torch.tensor([ids[:length] for ids in encoded if len(ids) >= length], dtype=torch.int64)
