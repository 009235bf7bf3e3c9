"""vLLM's runner V2 on a CPU, in Triton's interpreter: tests of engine and servers, each set in a new process."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from specdec.inference.config import ROOT
from specdec.inference.vllm.hooks import installed, read_hooks
from tests.vllm.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(
    tuple(map(int, installed().split(".")[:2])) < (0, 32), reason=f"runner V2 of vLLM {installed()} lacks names"
)


def test_this_vllm_has_every_name_that_both_runners_need() -> None:
    hooks = read_hooks()
    assert hooks is not None
    assert hooks.missing == {"V1": [], "V2": []}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "tests",
    [
        ("test_engine.py", "-k", "are_those_of_our_own_engine and short and (noise or output)"),
        pytest.param(("test_engine.py",), marks=pytest.mark.release),
        pytest.param(("test_servers.py", "-k", "draft_worker or lost_core"), marks=pytest.mark.release),
        pytest.param(("test_serve_several.py", "-m", "release", "-k", "noise"), marks=pytest.mark.release),
    ],
    ids=["smoke", "engine", "servers", "pool beside vLLM"],
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
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **INTERPRETED},
    )
    assert await process.wait() == 0
