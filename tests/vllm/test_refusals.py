"""Tests of starts that fail in vLLM's engine core or worker: the error is one line with the reason and the flag."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specdec.inference.config import ServerConfig
from specdec.inference.errors import ConfigError
from specdec.inference.vllm.options import VllmModel
from tests.vllm.conftest import FLAGS, WORKER_PROCESS, Pair


async def refused(model: Path, *flags: str) -> str:
    """Start an engine over vLLM with this model and flags, which must fail; return the error, which must be a line."""
    from specdec.inference.serving.vllm_target import vllm_engine

    with pytest.raises(ConfigError) as caught:
        async with vllm_engine(VllmModel(model, (*FLAGS, *flags)), ServerConfig()):
            pass
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    return caught.value.message


@pytest.mark.release
@pytest.mark.parametrize("has_worker", ["0", "1"], ids=["core", "worker"])
async def test_a_broken_file_is_named(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_worker: str
) -> None:
    """If vLLM's engine core or worker cannot read a file of the model, the target's error names the reason.

    Regression: the error only said that the engine core had failed, and referred to lines above.
    """
    monkeypatch.setenv(WORKER_PROCESS, has_worker)
    model = shutil.copytree(pair.target, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "deserializing header" in await refused(model)
