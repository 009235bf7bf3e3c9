"""Functions that run one pass of a model, for `benchmarks.passes`: by plain Transformers, and by each backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.decoding import load_model
from benchmarks.shapes import MAX_LENGTH
from specdec.inference.model.slots import Span

PAST_LENGTH = 128
Pass = Callable[[int], object]
"""Function that runs a pass over a number of tokens after PAST_LENGTH others, with logits for all of them."""


def token_ids(width: int) -> list[int]:
    return [(index * 7919 + 13) % 2000 for index in range(width)]


def transformers_pass(path: Path, num_threads: int) -> Pass:
    """Return a function that runs a pass of plain Transformers in eager mode, and restores its KV cache after it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def run(width: int) -> object:
        torch.set_num_threads(num_threads)
        logits = model(torch.tensor([token_ids(width)]), past_key_values=cache).logits
        cache.crop(-width)
        return logits

    with torch.inference_mode():
        model(torch.tensor([token_ids(PAST_LENGTH)]), past_key_values=cache)
    return run


def backend_pass(name: str, dtype: str, path: Path, num_threads: int) -> Pass:
    """Return a function that runs one pass of a backend of this project; its argument is the number of tokens."""
    backend = load_model(path, backend=name, dtype=dtype, threads=num_threads, max_length=MAX_LENGTH)
    backend.forward([Span(0, 0, token_ids(PAST_LENGTH), 0)])

    def run(width: int) -> object:
        torch.set_num_threads(num_threads)
        return backend.forward([Span(0, PAST_LENGTH, token_ids(width), width)])

    return run


ENGINES: dict[str, Callable[[Path, int], Pass]] = {
    "transformers": transformers_pass,
    "torch": partial(backend_pass, "torch", "float32"),
    "onnx": partial(backend_pass, "onnx", "float32"),
    "onnx-int8": partial(backend_pass, "onnx", "int8"),
}
