"""vLLM's runner V2 on a CPU, in Triton's interpreter: an engine, and before a release more tests in new processes."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from typing import Any

import pytest

from specdec.inference.config import ROOT, ServerConfig
from specdec.inference.serving.assembly import running
from specdec.inference.vllm.hooks import installed, read_hooks
from specdec.inference.vllm.options import VllmModel
from tests.support.engine_contract import Drafting, completed, onnx_engine, wanted
from tests.vllm.conftest import FLAGS, INTERPRETED, MAX_LENGTH, Pair

pytestmark = pytest.mark.skipif(
    tuple(map(int, installed().split(".")[:2])) < (0, 32), reason=f"runner V2 of vLLM {installed()} lacks names"
)


def test_this_vllm_has_every_name_that_both_runners_need() -> None:
    hooks = read_hooks()
    assert hooks is not None
    assert hooks.missing == {"V1": [], "V2": []}


async def test_an_engine_has_the_tokens_of_our_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine core on runner V2 has the tokens of our own engine; this process itself needs no interpreter."""
    from specdec.inference.serving.vllm_target import vllm_engine

    modes = ("noise", "penalties of the output")
    async with running(onnx_engine(pair.target, MAX_LENGTH)) as onnx:
        right = {mode: (await completed(onnx, wanted(mode, max_new_tokens=28)))[0] for mode in modes}
    for name, value in INTERPRETED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # as this process would find, had it the environment
    async with vllm_engine(VllmModel(pair.target, FLAGS, gamma=16), ServerConfig(max_waiting=2)) as (held, _):
        engine: Any = held.engine
        assert engine._llm.vllm_config.use_v2_model_runner
        for mode, tokens in right.items():
            request = wanted(mode, max_new_tokens=28)
            assert (await completed(engine, request))[0] == tokens
            assert (await completed(engine, request, Drafting(tokens, 0.3, random.Random(1))))[0] == tokens


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "tests",
    [
        ("test_engine.py",),
        ("test_servers.py", "-k", "draft_worker or lost_core"),
        ("test_serve_several.py", "-m", "release", "-k", "noise"),
    ],
    ids=["engine", "servers", "pool beside vLLM"],
)
async def test_runner_v2_passes(tests: tuple[str, ...]) -> None:
    """With vLLM's runner V2, the chosen tests of the other files pass."""
    file, *chosen = tests
    program = (sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", "-p", "no:cacheprovider", "--timeout", "900")
    process = await asyncio.create_subprocess_exec(
        *program,
        str(ROOT / "tests" / "vllm" / file),
        *chosen,
        cwd=ROOT,
        env={**os.environ, **INTERPRETED},
    )
    assert await process.wait() == 0
