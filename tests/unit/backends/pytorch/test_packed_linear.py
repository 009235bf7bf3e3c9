"""Linear layers with weights packed by oneDNN compute what plain layers do; where they cannot, plain ones stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from specdec.inference.backends.pytorch import packed_linear
from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.backends.pytorch.packed_linear import PackedLinear, pack_linears
from specdec.inference.model.slots import Span
from tests.support.backend_contract import MAX_LENGTH, NUM_SLOTS
from tests.support.models import FAMILIES, tiny_model


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.inference_mode():
        yield


LAYERS: dict[str, Callable[[], Any]] = {
    "bias": lambda: torch.nn.Linear(24, 36),
    "no bias": lambda: torch.nn.Linear(24, 36, bias=False),
    "GPT-2's Conv1D, which ran unpacked": lambda: Conv1D(36, 24),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("width", [1, 2, 7, 40])
def test_it_computes_what_the_layer_did(layer: str, width: int) -> None:
    linear, tokens = LAYERS[layer](), torch.randn(1, width, 24)
    torch.testing.assert_close(PackedLinear(linear)(tokens), linear(tokens), rtol=0, atol=1e-5)


@pytest.fixture(autouse=True)
def pack_small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "MIN_WEIGHTS", 0)


def linears(model: torch.nn.Module) -> tuple[int, int]:
    """Return (number of plain linear layers, number of packed linear layers) of a model."""
    modules = list(model.modules())
    return sum(type(m) in (torch.nn.Linear, Conv1D) for m in modules), sum(type(m) is PackedLinear for m in modules)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_packed(family: str) -> None:
    """In every model family all linear layers are packed; test_backend.py compares their logits."""
    model = tiny_model(family)
    TorchBackend(model, num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
    num_plain, num_packed = linears(model)
    assert num_plain == 0
    assert num_packed > 0


def test_small_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "MIN_WEIGHTS", 33 * 48)
    model = tiny_model("llama")
    TorchBackend(model, num_slots=1, max_length=MAX_LENGTH)
    assert linears(model) == (2 * 7, 1)  # the head is larger


def test_other_dtypes_stay_as_they_are() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    TorchBackend(model, num_slots=1, max_length=MAX_LENGTH)
    assert linears(model) == (2 * 7 + 1, 0)


def test_operators_that_compute_something_else_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, tokens: forward(self, tokens) * 1.01)
    model = tiny_model("llama")
    with caplog.at_level(logging.INFO):
        TorchBackend(model, num_slots=1, max_length=MAX_LENGTH)
    assert linears(model) == (2 * 7 + 1, 0)
    assert "linear layers stay as they are, packing them fails: off by" in caplog.text


def test_operators_that_are_missing_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(packed_linear, "PackedLinear", missing)
    model = tiny_model("llama")
    with caplog.at_level(logging.INFO):
        backend = TorchBackend(model, num_slots=1, max_length=MAX_LENGTH)
    assert linears(model) == (2 * 7 + 1, 0)
    assert "no such operator" in caplog.text
    assert backend.forward([Span(0, 0, (1,), 1)]).shape == (1, backend.vocab_size)


def test_nan_is_no_agreement() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    answers = iter([torch.ones(1), torch.tensor([torch.nan])])
    pack_linears(model, lambda: next(answers))
    assert linears(model) == (1, 0)
