"""Fixtures of the tests on the real vLLM, in an environment of its own: `make test-vllm`."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm has an environment with it")
import pytest_asyncio

from specdec.inference.config import ServerConfig
from specdec.inference.vllm.options import VllmModel, prepare_environment

prepare_environment("info")
SETTINGS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ.update(SETTINGS, HF_HUB_OFFLINE="1", DO_NOT_TRACK="1")

MAX_LENGTH = 128
FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4", "--max-model-len", str(MAX_LENGTH)),
    *("--block-size", "32", "--num-gpu-blocks-override", "9", "--max-num-batched-tokens", "64"),
)
"""Flags of vLLM: memory and passes are so small that requests are preempted, and prompts are read in parts."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Directories of a target and of a draft that is often right."""

    target: Path
    draft: Path


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Write two tiny models with heads that vLLM's attention knows on a CPU."""
    from tests.support.models import disturbed, save_tiny_model, tiny_model, tiny_tokenizer

    root = tmp_path_factory.mktemp("pair")
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 32}
    draft = root / "draft"
    disturbed(tiny_model("llama", seed=1, **sizes)).save_pretrained(draft)
    tiny_tokenizer().save_pretrained(draft)
    return Pair(save_tiny_model(root / "target", "llama", seed=1, **sizes), draft)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(pair: Pair) -> AsyncGenerator[Any, None]:
    """Run vLLM with our engine in front of it, in processes of this one."""
    from specdec.inference.serving.vllm_target import vllm_engine

    async with vllm_engine(VllmModel(pair.target, FLAGS, gamma=16), ServerConfig(max_waiting=2)) as (running, _):
        yield running.engine
