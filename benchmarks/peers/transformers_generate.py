"""Transformers' own generation in float32, without and with the draft as assistant model, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.child import Loaded, Setup, answer


def load(setup: Setup) -> Loaded:
    torch.set_num_threads(1)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (setup.target, setup.draft)
    )
    variants = {"plain": partial(_generate, target), "assisted": partial(_generate, target, assistant_model=draft)}
    return Loaded(variants, {"transformers": transformers.__version__, "torch": torch.__version__})


def _generate(target: Any, prompts: Sequence[list[int]], num_tokens: int, **options: Any) -> list[list[int]]:
    [prompt] = prompts
    inputs = torch.tensor([prompt])
    limits = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "pad_token_id": 0}
    mask = torch.ones_like(inputs)
    output = target.generate(inputs, attention_mask=mask, do_sample=False, **limits, **options)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return [tokens]


if __name__ == "__main__":
    answer(load)
