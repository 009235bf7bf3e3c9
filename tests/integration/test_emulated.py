"""Tests that `compare` and `study` find the known best settings at servers whose passes are slowed to known times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.cli.roles.registry import parser_of
from specdec.inference.config import ROOT
from tests.conftest import ModelDirectories

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two machines need two cores"),
]


def results_of(*arguments: str) -> dict[str, Any]:
    """Run compare_architectures.py; return the JSON object in the last line of its standard output."""
    command = [sys.executable, str(ROOT / "compare_architectures.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_capacity_ends_where_passes_are_too_long(models: ModelDirectories, tmp_path: Path) -> None:
    """The capacity that `--capacity` finds is the most simultaneous streams that each meet the limits of `--slo`.

    A pass over five sessions takes 45 ms, so a target alone cannot give five streams a token every 41 ms.
    """
    (tmp_path / "prompts.txt").write_text("in the wing\nof the\n")
    flags = [
        *("--capacity", "16", "--slo", "itl:41ms,ttft:5s", "--topologies", "target,pool", "--workers", "1,2"),
        *("--target_model", str(models.target), "--draft_models", str(models.target), "--temperature", "1"),
        *("--prompt_file", str(tmp_path / "prompts.txt"), "--max_new_tokens", "16", "--rtt_ms", "0,5"),
        *("--emulate", "target:20ms+5ms/session", "--budget", "2m", "--output", str(tmp_path / "capacity")),
    ]
    results = results_of(*flags)
    assert (results["same_tokens"], results["emulated"]) == (True, "target:20ms+5ms/session")
    found = {(it["served_by"], it["rtt_ms"]): it["streams"] for it in results["capacities"]}
    assert 1 <= found["target", 5.0] <= 4
    assert ("pool", 0.0) in found
    table = (tmp_path / "capacity" / "capacity.md").read_text()
    assert "EMULATED" in table
    assert "![Rate of a slow stream" in table


def test_a_free_draft_looks_far_ahead_when_cheap(models: ModelDirectories, tmp_path: Path) -> None:
    """For a free draft that is always right, a study recommends one server for both models, and the largest gamma.

    With the draft at the other end of a link of 900 ms, waiting for its tokens is slower than no draft. Target and
    draft are the same model, at a temperature at which no text repeats.
    """
    (tmp_path / "prompts.txt").write_text("in the wing\n")
    flags = [
        *("--target_model", str(models.target), "--draft_models", str(models.target), "--emulate", "target:30ms"),
        *("--prompt_file", str(tmp_path / "prompts.txt"), "--temperature", "1", "--max_new_tokens", "24"),
        *("--rtt_ms", "900", "--gamma", "8,1", "--schedule", "sync", "--concurrency", "1", "--num_runs", "2"),
        *("--anyway", "--budget", "5m", "--price_per_hour", "20", "--output", str(tmp_path / "study")),
    ]
    results = results_of("study", *flags)
    assert (results["same_tokens"], results["emulated"]) == (True, "target:30ms")
    assert "EMULATED" in (tmp_path / "study" / "study.html").read_text()
    assert (results["recommended"]["topology"], results["recommended"]["gamma"]) == ("fused", 8)
    rounds = [it["speedup"]["median"] for it in results["trials"] if it["contender"]["topology"] == "distributed"]
    assert max(rounds) < 1
    assert any(sentence.startswith("Slower than the target alone in") for sentence in results["advice"])
    assert all(it["cost_per_million_tokens"] > 0 for it in results["trials"])
    service = parser_of("fused_target").parse_args(["--config", str(tmp_path / "study" / "service.toml")])
    assert (service.target_model, service.gamma, service.adaptive_gamma) == (models.target, 8, False)
