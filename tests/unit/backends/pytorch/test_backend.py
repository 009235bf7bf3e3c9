"""The torch backend gives the logits of plain Transformers, whatever its slots went through before."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from transformers import DynamicCache

from specdec.inference.backends.pytorch import attention
from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.backends.pytorch.passes import EagerPasses
from specdec.inference.backends.pytorch.slot_cache import SlotCache
from specdec.inference.model.slots import Backend, Span
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


@lru_cache(maxsize=1)
def backend_of(family: str) -> TorchBackend:
    """Return one backend per family for all examples: the tokens that earlier ones left must not matter."""
    return TorchBackend(tiny_model(family), num_slots=NUM_SLOTS, max_length=MAX_LENGTH)


def cache_of(backend: TorchBackend) -> SlotCache:
    assert isinstance(backend.passes, EagerPasses)
    return backend.passes._cache


@pytest.fixture
def backend() -> TorchBackend:
    return TorchBackend(tiny_model("llama"), num_slots=NUM_SLOTS, max_length=MAX_LENGTH)


@pytest.fixture(scope="module", params=CONTRACTS["torch", "float32"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestContract(BackendContract):
    def backend_of(self, family: str) -> Backend:
        return backend_of(family)

    def fresh(self) -> Backend:
        return TorchBackend(tiny_model("llama"), num_slots=NUM_SLOTS, max_length=MAX_LENGTH)


def test_a_mask_off_by_one_is_noticed(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    triangle = torch.Tensor.triu_
    monkeypatch.setattr(torch.Tensor, "triu_", lambda mask, diagonal: triangle(mask, diagonal + 1))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_matches(backend, reference("llama"), HISTORY)


def test_slots_that_leak_are_noticed(backend: TorchBackend) -> None:
    for layer in range(2):
        slots = cache_of(backend)._slot_keys[layer]
        cache_of(backend)._slot_keys[layer] = (slots[0], slots[1], slots[0])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_matches(backend, reference("llama"), HISTORY)


def test_wide_spans_after_a_past_do_not_fold_heads(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_FOLDED_TOKENS", 2)
    assert_matches(backend, reference("llama"), HISTORY)


def test_stale_positions_are_never_seen(backend: TorchBackend) -> None:
    with torch.inference_mode():
        for room in (*cache_of(backend).keys, *cache_of(backend).values):
            room.fill_(1e4)
    assert_matches(backend, reference("llama"), HISTORY)


def test_other_slots_are_left_alone(backend: TorchBackend) -> None:
    before = [room.clone() for room in (*cache_of(backend).keys, *cache_of(backend).values)]
    backend.forward([Span(1, 0, TOKENS[:5], 0)])
    for room, old in zip((*cache_of(backend).keys, *cache_of(backend).values), before, strict=True):
        assert torch.equal(room[0], old[0])
        assert torch.equal(room[2], old[2])
        assert not torch.equal(room[1, :, :5], old[1, :, :5])
        assert torch.equal(room[1, :, 5:], old[1, :, 5:])


def test_a_pass_that_wants_no_logits_skips_the_head(backend: TorchBackend) -> None:
    def no_head(*_: object) -> None:
        raise AssertionError("the head ran")

    assert isinstance(backend.passes, EagerPasses)
    head = backend.passes._runner.model.get_output_embeddings()
    head.register_forward_pre_hook(no_head)
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
