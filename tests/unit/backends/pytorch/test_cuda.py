"""The torch backend on a GPU, eager and with CUDA graphs; skipped if torch finds none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from specdec.inference.backends.pytorch.backend import CAPTURED, TorchBackend
from specdec.inference.backends.pytorch.graphs import Captured
from specdec.inference.backends.pytorch.static_pass import FixedShapes
from specdec.inference.model.slots import Backend, Span
from tests.support.backend_contract import MAX_LENGTH, NUM_SLOTS, BackendContract
from tests.support.models import CONTRACTS, tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda")


class OnHost(TorchBackend):
    """A backend that brings logits to the host, where the suite compares them."""

    def forward(self, spans: Sequence[Span]) -> np.ndarray[Any, Any]:
        logits: np.ndarray[Any, Any] = torch.as_tensor(super().forward(spans)).cpu().numpy()
        return logits


@cache
def backend_of(family: str, is_captured: bool) -> Backend:
    fixed = FixedShapes(Captured(), CAPTURED) if is_captured else None
    backend = OnHost(tiny_model(family), num_slots=NUM_SLOTS, max_length=MAX_LENGTH, fixed=fixed, device=DEVICE)
    backend.warm_up()
    return backend


@pytest.fixture(params=CONTRACTS["torch", "float32"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestAsTheyCome(BackendContract):
    def backend_of(self, family: str) -> Backend:
        return backend_of(family, False)

    def fresh(self) -> Backend:
        return backend_of("llama", False)


class TestCaptured(BackendContract):
    def backend_of(self, family: str) -> Backend:
        return backend_of(family, True)

    def fresh(self) -> Backend:
        return backend_of("llama", True)

    def test_no_graph_is_made_late(self, family: str) -> None:
        backend = backend_of(family, True)
        assert isinstance(backend, TorchBackend)
        assert (backend.graphs.num > 0, backend.graphs.num_late) == (True, 0)
