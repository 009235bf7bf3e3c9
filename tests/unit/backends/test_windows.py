"""Sliding windows of about a hundred tokens give right logits for longer prompts, which kernels compute in blocks."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.inference.backends.registry import load_backend
from specdec.inference.config import ModelConfig
from specdec.inference.model.slots import Span
from tests.support.backend_contract import Reference
from tests.support.models import DEFAULT_VOCAB_SIZE, save_tiny_model, tiny_model

WINDOW: dict[str, Any] = {"sliding_window": 100, "max_position_embeddings": 1024}
WIDTHS = (300, 1, 5, 150, 40, 1)


@pytest.mark.parametrize(
    ("backend", "family"),
    [("torch", "mistral, windows"), ("torch", "gpt_oss"), ("onnx", "mistral, windows"), ("onnx", "gemma2")],
)
def test_long_prompts_leave_their_windows(backend: str, family: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family, **WINDOW)
    config = ModelConfig(path, backend=backend, num_slots=1, sequence_length=sum(WIDTHS), num_threads=1)
    loaded = load_backend(config)
    tokens = np.random.default_rng(0).integers(DEFAULT_VOCAB_SIZE, size=sum(WIDTHS)).tolist()
    ends = pairwise((0, *accumulate(WIDTHS)))
    logits = [loaded.forward([Span(0, start, tokens[start:end], end - start)]) for start, end in ends]
    expected = Reference(tiny_model(family, **WINDOW)).logits(tuple(tokens))
    np.testing.assert_allclose(np.concatenate(logits), expected, rtol=0, atol=2e-4)
