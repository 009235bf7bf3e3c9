"""Passes of fixed shapes give the same logits as others; here without CUDA, so nothing is captured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from inference.backends.pytorch import static_pass
from inference.backends.pytorch.backend import TorchBackend
from inference.backends.pytorch.static_pass import StaticPass, StaticPasses
from inference.model.slots import Span
from tests.support.backend_contract import (
    HISTORY,
    MAX_LENGTH,
    NUM_SLOTS,
    TOKENS,
    Move,
    assert_matches,
    histories,
    reference,
)
from tests.support.models import tiny_model


def static_backend(family: str = "llama") -> TorchBackend:
    return TorchBackend(tiny_model(family), num_slots=NUM_SLOTS, max_length=MAX_LENGTH, fixed_shapes=True)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "mistral, windows"])
def test_any_history_gives_the_logits_of_a_fresh_forward(family: str) -> None:
    backend, plain = static_backend(family), reference(family)

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(history=histories)
    def check(history: list[list[Move]]) -> None:
        assert_matches(backend, plain, history)

    check()
    assert backend._static is not None


def test_wider_passes_run_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_pass, "WIDTHS", (1, 3))
    backend = static_backend()
    assert_matches(backend, reference("llama"), HISTORY)
    assert backend._static is not None
    assert {width for _, width, _ in backend._static._replays} <= {1, 3}


def test_longer_passes_read_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_pass, "SHORTEST_LENGTH", 4)
    backend = static_backend()
    for start in range(MAX_LENGTH):
        logits = backend.forward([Span(1, start, TOKENS[start : start + 1], 1)])
        np.testing.assert_allclose(logits[0], reference("llama").logits(TOKENS)[start], rtol=0, atol=1e-4)
    assert backend._static is not None
    assert [length for *_, length in backend._static._replays] == [4, 8, 16, MAX_LENGTH]


def test_what_fills_up_leaves_the_slots_alone() -> None:
    backend = static_backend()
    backend.forward([Span(0, 0, TOKENS[:3], 0), Span(1, 0, TOKENS[:8], 0), Span(2, 0, TOKENS[:1], 0)])
    for slot, end in ((0, 3), (1, 8), (2, 1)):
        for room in (*backend._cache.keys, *backend._cache.values):
            assert room[slot, :, :end].any()
            assert not room[slot, :, end:MAX_LENGTH].any()


def test_the_result_outlives_the_next_pass() -> None:
    backend = static_backend()
    logits = backend.forward([Span(0, 0, TOKENS[:3], 3)])
    kept = logits.copy()
    backend.forward([Span(0, 0, TOKENS[5:8], 3)])
    np.testing.assert_array_equal(logits, kept)


def test_a_shape_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    init = StaticPass.__init__

    def counting(self: StaticPass, *args: object, **fields: int) -> None:
        made.append((fields["batch"], fields["width"]))
        init(self, *args, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(StaticPass, "__init__", counting)
    backend = static_backend()
    for start in range(4):
        backend.forward([Span(0, start, TOKENS[start : start + 1], 1)])
    backend.forward([Span(0, 4, TOKENS[4:8], 1), Span(1, 0, TOKENS[:2], 1)])
    assert made == [(1, 1), (2, 5)]


def test_a_pass_that_fails_goes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As capturing does where a layer needs the device's answer in the middle of a pass."""

    def fail(self: StaticPasses, spans: Sequence[Span]) -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StaticPasses, "forward", fail)
    backend = static_backend()
    assert_matches(backend, reference("llama"), HISTORY)
    assert backend._static is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_graphs_replay_what_was_captured() -> None:
    model = tiny_model("llama").to("cuda")
    backend = TorchBackend(model, num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
    for start in range(0, MAX_LENGTH, 4):
        for _ in range(2):  # captured, or replayed
            logits = backend.forward([Span(1, start, TOKENS[start : start + 4], 4)])
            expected = reference("llama").logits(TOKENS)[start : start + 4]
            np.testing.assert_allclose(logits.cpu().numpy(), expected, rtol=0, atol=1e-2)
    assert backend._static is not None
