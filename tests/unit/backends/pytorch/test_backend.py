"""The torch backend gives the logits of Transformers, whatever its slots of the KV cache were used for before."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from specdec.inference.backends.pytorch import attention
from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.model.slots import Span
from tests.support.backend_contract import (
    HISTORY,
    MAX_LENGTH,
    NUM_SLOTS,
    TOKENS,
    BackendContract,
    assert_matches,
    reference,
)
from tests.support.models import CONTRACTS, tiny_model


@pytest.fixture
def backend() -> TorchBackend:
    return TorchBackend(tiny_model("llama"), num_slots=NUM_SLOTS, max_length=MAX_LENGTH)


class TestContract(BackendContract):
    families = CONTRACTS["torch", "float32"]

    def load(self, family: str) -> TorchBackend:
        return TorchBackend(tiny_model(family), num_slots=NUM_SLOTS, max_length=MAX_LENGTH)


def test_wide_spans_after_a_past_do_not_fold_heads(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_FOLDED_TOKENS", 2)
    assert_matches(backend, reference("llama"), HISTORY)


def test_a_pass_that_wants_no_logits_skips_the_head() -> None:
    def no_head(*_: object) -> None:
        raise AssertionError("the head ran")

    model = tiny_model("llama")
    backend = TorchBackend(model, num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
    model.get_output_embeddings().register_forward_pre_hook(no_head)
    backend.forward([Span(0, 0, TOKENS[:5], 0), Span(1, 0, TOKENS[:2], 0)])


def test_transformers_keeps_no_cache_of_its_own(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a cache was built")

    monkeypatch.setattr(DynamicCache, "__init__", refuse)
    assert_matches(backend, reference("llama"), HISTORY)


def test_transformers_builds_no_mask(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[object] = []
    attend = attention.SlotPass.attend

    def spy(self: attention.SlotPass, *arguments: torch.Tensor, **options: dict[str, object]) -> torch.Tensor:
        masks.append(options["options"]["attention_mask"])
        return attend(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(attention.SlotPass, "attend", spy)
    assert_matches(backend, reference("llama"), HISTORY)
    assert masks == [None] * 2 * len(HISTORY)


@pytest.mark.parametrize("family", CONTRACTS["torch", "bfloat16"])
def test_bfloat16_stays_close_to_float32(family: str) -> None:
    half = TorchBackend(tiny_model(family).to(torch.bfloat16), num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
    tolerance = 0.5 if family in ("llama", "gpt2") else 1.0  # logits have a standard deviation of 2
    assert_matches(half, reference(family), HISTORY, tolerance=tolerance)
