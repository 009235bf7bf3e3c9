"""The study must recommend the known optimum of real servers with emulated passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.inference.cli.roles.registry import parser_of
from specdec.inference.config import ROOT
from tests.conftest import ModelDirectories

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two machines need two cores"),
]


def test_a_free_draft_looks_far_ahead_when_cheap(models: ModelDirectories, tmp_path: Path) -> None:
    """A study of a draft that is free and always right chooses many draft tokens.

    Rounds over 900 ms lose to the target alone; in one server more draft tokens gain more. Draft and target are one
    model, at a temperature at which nothing repeats.
    """
    (tmp_path / "prompts.txt").write_text("in the wing\n")
    flags = [
        *("--target_model", str(models.target), "--draft_models", str(models.target), "--emulate", "target:30ms"),
        *("--prompt_file", str(tmp_path / "prompts.txt"), "--temperature", "1", "--max_new_tokens", "24"),
        *("--rtt_ms", "900", "--gamma", "8,1", "--schedule", "sync", "--concurrency", "1", "--num_runs", "2"),
        *("--anyway", "--budget", "5m", "--price_per_hour", "20", "--output", str(tmp_path / "study")),
    ]
    command = [sys.executable, str(ROOT / "compare_architectures.py"), "study", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert (results["same_tokens"], results["emulated"]) == (True, "target:30ms")
    assert "EMULATED" in (tmp_path / "study" / "study.html").read_text()
    assert (results["recommended"]["topology"], results["recommended"]["gamma"]) == ("fused", 8)
    rounds = [it["speedup"]["median"] for it in results["trials"] if it["contender"]["topology"] == "distributed"]
    assert max(rounds) < 1
    assert any(sentence.startswith("Slower than the target alone in") for sentence in results["advice"])
    assert all(it["cost_per_million_tokens"] > 0 for it in results["trials"])
    service = parser_of("fused_target").parse_args(["--config", str(tmp_path / "study" / "service.toml")])
    assert (service.target_model, service.gamma, service.adaptive_gamma) == (models.target, 8, False)
