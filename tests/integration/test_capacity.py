"""The search for capacities over real servers with emulated passes, which limit every machine alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.inference.config import ROOT
from tests.conftest import ModelDirectories

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two machines need two cores"),
]


def test_capacity_ends_where_passes_are_too_long(models: ModelDirectories, tmp_path: Path) -> None:
    """The capacity found ends where passes become too long for the promised time per token.

    A pass over five sessions takes 45 ms, so five streams cannot have 41 ms a token; a pool of two drafts helps.
    """
    (tmp_path / "prompts.txt").write_text("in the wing\nof the\n")
    flags = [
        *("--capacity", "16", "--slo", "itl:41ms,ttft:5s", "--topologies", "target,pool", "--workers", "1,2"),
        *("--target_model", str(models.target), "--draft_models", str(models.target), "--temperature", "1"),
        *("--prompt_file", str(tmp_path / "prompts.txt"), "--max_new_tokens", "16", "--rtt_ms", "0,5"),
        *("--emulate", "target:20ms+5ms/session", "--budget", "2m", "--output", str(tmp_path / "capacity")),
    ]
    command = [sys.executable, str(ROOT / "compare_architectures.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert (results["same_tokens"], results["emulated"]) == (True, "target:20ms+5ms/session")
    found = {(it["served_by"], it["rtt_ms"]): it["streams"] for it in results["capacities"]}
    assert 1 <= found["target", 5.0] <= 4
    assert ("pool", 0.0) in found
    table = (tmp_path / "capacity" / "capacity.md").read_text()
    assert "EMULATED" in table
    assert "![Rate of a slow stream" in table
