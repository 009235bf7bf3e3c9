"""The study over real servers whose optimum is known, for their passes are emulated: it must recommend that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inference.cli.roles.registry import parser_of
from inference.config import ROOT
from tests.conftest import ModelDirectories

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two machines need two cores"),
]


def _study(models: ModelDirectories, output: Path, *flags: str) -> dict[str, Any]:
    """Draft and target are one model, at a temperature where nothing repeats: every draft token is right."""
    prompts = output.with_suffix(".txt")
    prompts.write_text("in the wing\n")
    asked = ["--target_model", str(models.target), "--draft_models", str(models.target), "--prompt_file", str(prompts)]
    fixed = ["--temperature", "1", "--num_runs", "1", "--concurrency", "1", "--budget", "5m", "--output", str(output)]
    command = [sys.executable, str(ROOT / "compare_architectures.py"), "study", *asked, *fixed, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert results["same_tokens"]
    assert results["emulated"]
    assert "EMULATED" in (output / "study.html").read_text()
    return results


def test_a_free_draft_beside_a_slow_target_is_to_draft_far_and_not_over_a_slow_link(
    models: ModelDirectories, tmp_path: Path
) -> None:
    """Rounds over 300 ms lose to the target alone; both models in one server gain the more the further they draft."""
    flags = ["--emulate", "target:20ms", "--rtt_ms", "300", "--gamma", "8,1", "--schedule", "sync", "--num_runs", "3"]
    results = _study(models, tmp_path / "far", *flags, "--max_new_tokens", "32")
    advised = results["recommended"]
    assert (advised["topology"], advised["gamma"]) == ("fused", 8)
    rounds = [it["speedup"]["median"] for it in results["trials"] if it["contender"]["topology"] == "distributed"]
    assert max(rounds) < 1
    assert any(sentence.startswith("Slower than the target alone in") for sentence in results["advice"])
    service = parser_of("fused_target").parse_args(["--config", str(tmp_path / "far" / "service.toml")])
    assert (service.target_model, service.gamma, service.adaptive_gamma) == (models.target, 8, False)


def test_a_draft_slower_than_its_target_is_to_be_left_out(models: ModelDirectories, tmp_path: Path) -> None:
    flags = ["--emulate", "target:5ms,draft:25ms", "--topologies", "target,fused", "--rtt_ms", "0", "--gamma", "2,4"]
    results = _study(models, tmp_path / "slow", *flags, "--max_new_tokens", "12", "--price_per_hour", "20")
    assert results["recommended"]["topology"] == "target"  # alone, or with what it looks up, which is about as fast
    fused = [it["speedup"]["median"] for it in results["trials"] if it["contender"]["topology"] == "fused"]
    assert fused
    assert max(fused) < 1
    assert all(it["cost_per_million_tokens"] > 0 for it in results["trials"])
    service = parser_of("target").parse_args(["--config", str(tmp_path / "slow" / "service.toml")])
    assert service.model == models.target
