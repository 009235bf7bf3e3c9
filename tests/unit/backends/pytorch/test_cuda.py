"""The torch backend on a GPU, eager and with CUDA graphs; the tests are skipped if torch finds no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec.inference.backends.pytorch.backend import CAPTURED, TorchBackend
from specdec.inference.backends.pytorch.graphs import Captured
from specdec.inference.backends.pytorch.shapes import Buckets
from specdec.inference.backends.pytorch.static_pass import FixedShapes
from specdec.inference.model.slots import Backend, Span, Windows
from tests.support.backend_contract import MAX_LENGTH, NUM_SLOTS, BackendContract
from tests.support.histories import LENGTH, different
from tests.support.models import CONTRACTS, tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda")


class OnHost(TorchBackend):
    """Backend that copies logits to the host, where the tests compare them."""

    def forward(self, spans: Sequence[Span]) -> np.ndarray[Any, Any]:
        logits: np.ndarray[Any, Any] = torch.as_tensor(super().forward(spans)).cpu().numpy()
        return logits


class TestAsTheyCome(BackendContract):
    families = CONTRACTS["torch", "float32"]
    is_captured = False

    def load(self, family: str) -> OnHost:
        fixed = FixedShapes(Captured(), CAPTURED) if self.is_captured else None
        backend = OnHost(tiny_model(family), num_slots=NUM_SLOTS, max_length=MAX_LENGTH, fixed=fixed, device=DEVICE)
        backend.warm_up()
        return backend

    def fresh(self) -> Backend:
        return self.shared("llama")


class TestCaptured(TestAsTheyCome):
    is_captured = True

    def test_no_graph_is_made_late(self, family: str) -> None:
        backend = self.shared(family)
        assert isinstance(backend, TorchBackend)
        assert (backend.graphs.num > 0, backend.graphs.num_late) == (True, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", CONTRACTS["torch", "bfloat16"])
def test_no_history_changes_a_bit_in_windows(family: str, dtype: torch.dtype) -> None:
    one_shape = Buckets(widths=(16,), prompts=(), batches=(NUM_SLOTS,), shortest=20, shares_slots=True)
    backend = OnHost(
        tiny_model(family).to(dtype),
        num_slots=NUM_SLOTS,
        max_length=LENGTH,
        fixed=FixedShapes(Captured(), one_shape),
        device=DEVICE,
        windows=Windows(16, NUM_SLOTS),
    )
    backend.warm_up()
    assert set(different(backend).values()) == {0}
