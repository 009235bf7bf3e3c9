"""Logits in int8 are near those in float32, and a token's logits do not depend on other tokens of the pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.inference.backends.onnx import int8 as onnx_int8
from specdec.inference.backends.onnx.backend import OnnxBackend
from specdec.inference.backends.registry import load_backend
from specdec.inference.config import BUNDLED_TARGET, ModelConfig
from specdec.inference.errors import ConfigError, UnsupportedModelError
from specdec.inference.model.slots import Array, Span
from tests.support.backend_contract import HISTORY, NUM_SLOTS, TOKENS, assert_matches, reference
from tests.support.histories import different
from tests.support.models import CONTRACTS, save_tiny_model

NEAR = 0.5 * 127 / onnx_int8.weight_levels()  # where float32 logits reach 10


def load(path: Path, **fields: Any) -> OnnxBackend:
    settings: dict[str, Any] = {
        "backend": "onnx",
        "dtype": "int8",
        "num_slots": NUM_SLOTS,
        "sequence_length": 128,
        "num_threads": 1,
    }
    backend = load_backend(ModelConfig(path, **(settings | fields)))
    assert isinstance(backend, OnnxBackend)
    return backend


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def target() -> OnnxBackend:
    return load(BUNDLED_TARGET)


def one_by_one(backend: OnnxBackend, slot: int, token_ids: Sequence[int]) -> Array:  # [num_tokens, vocab_size]
    passes = [backend.forward([Span(slot, i, [token_id], 1)]) for i, token_id in enumerate(token_ids)]
    return np.concatenate(passes)


@pytest.mark.parametrize("family", CONTRACTS["onnx", "int8"])
def test_it_is_near_float32(family: str, tmp_path: Path) -> None:
    tolerance = NEAR if family in ("llama", "qwen3") else 2 * NEAR
    assert_matches(load(save_tiny_model(tmp_path, family)), reference(family), HISTORY, tolerance=tolerance)


def test_a_token_does_not_feel_its_neighbours(target: OnnxBackend) -> None:
    """In int8 a token's logits do not depend on other tokens of its pass, since each token has its own scale."""
    expected = one_by_one(target, 0, TOKENS)
    wide = target.forward([Span(1, 0, TOKENS, len(TOKENS))])
    np.testing.assert_array_equal(wide, expected)
    several = target.forward([Span(2, 0, TOKENS[:9], 9), Span(1, 4, TOKENS[4:6], 2), Span(0, 0, TOKENS[:3], 3)])
    np.testing.assert_array_equal(several, expected[[*range(9), 4, 5, 0, 1, 2]])


@pytest.mark.parametrize("exact", ["always", "never"])
def test_float32_has_the_same_bits_at_every_width_if_asked(exact: str) -> None:
    """With `--exact always` a token's float32 logits have the same bits at any span length; with `never` they have not.

    `--exact always` adds a spare token to each span, which has this effect.
    """
    target = load(BUNDLED_TARGET, dtype="float32", exact=exact)
    differences = different(target)
    assert (sum(differences.values()) == 0) == (exact == "always"), differences
    assert ("with spare tokens" in target.arithmetic) == (exact == "always")


def test_int8_has_the_same_bits_in_every_history(target: OnnxBackend) -> None:
    assert set(different(target).values()) == {0}


@pytest.mark.parametrize("levels", [63, 127])
def test_columns_have_scales_of_their_own(levels: int) -> None:
    matrix = np.array([[1.0, 0.0, -200.0], [-0.5, 0.0, 3.0]], np.float32)
    quantized, scale = onnx_int8.quantize_columns(matrix, levels)
    assert quantized.dtype == np.int8
    assert quantized[0].tolist() == [levels, 0, -levels]
    np.testing.assert_allclose(quantized * scale, matrix, atol=200 / levels / 2)


def test_other_backends_refuse_it(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype int8: backend torch computes in floating point only"):
        load(checkpoint, backend="torch")
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not supported by backend onnx"):
        load(save_tiny_model(tmp_path, "gpt2"), backend="auto")
