"""This project's engine, over a tiny onnx model, passes the tests that all engines must pass."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from specdec.inference.engine.target import TargetEngine
from specdec.inference.serving.assembly import running
from tests.conftest import ModelDirectories
from tests.support.engine_contract import EngineContract, onnx_engine


class TestOurEngine(EngineContract):
    @pytest.fixture
    async def engine(self, models: ModelDirectories) -> AsyncGenerator[TargetEngine, None]:
        async with running(onnx_engine(models.target, self.MAX_LENGTH)) as engine:
            yield engine
