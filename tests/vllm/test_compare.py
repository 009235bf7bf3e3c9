"""Test of `specdec compare` over the real vLLM: a target alone, and one whose draft model vLLM runs itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from specdec.inference.config import ROOT
from tests.vllm.conftest import FLAGS, INTERPRETED, Pair

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]


async def test_a_fused_server_over_vllm_has_the_targets_tokens(pair: Pair, tmp_path: Path) -> None:
    """Both servers answer every prompt with the same tokens; of the second, some draft tokens are accepted."""
    prompts = tmp_path / "structured.txt"
    prompts.write_text("1 2 3 and\nin the wing\n")
    models = ("--target_model", str(pair.target), "--draft_models", str(pair.draft), "--gamma", "3")
    load = ("--prompt_file", str(prompts), "--num_runs", "1", "--max_new_tokens", "12", "--temperature", "0.8")
    which = ("--engine", "vllm", "--topologies", "target,fused", "--seed", "7", "--output", str(tmp_path / "report"))
    room = ("--num-gpu-blocks-override", "40")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "compare_architectures.py"), *models, *load, *which, "--start_timeout_s", "900"),
        *("--", *FLAGS, *room),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **INTERPRETED},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    results = json.loads(out.decode().splitlines()[-1])
    assert results["same_tokens"] is True
    rates = {cell["topology"]: cell["acceptance_rate"] for cell in results["cells"]}
    assert set(rates) == {"target", "fused"}
    assert rates["fused"] > 0
