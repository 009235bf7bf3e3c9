"""Tests of `make trainium-report`, which measures a pair of models on a Neuron machine; here NxDI runs on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from specdec.inference.config import ROOT
from tests.conftest import ModelDirectories
from tests.support.nxdi import PYTHON_PATH

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("on_real")]

SERVERS = "--backend neuron --dtype float32 --sequence_length 80 --batch 2 --threads 1"
LOAD = "--prompt_tokens 12 --output_tokens 10 --num_requests 2 --concurrency 2 --start_timeout_s 300"


def make(folder: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "NEURON_COMPILED_ARTIFACTS": str(folder / "artifacts"),
        "OMP_NUM_THREADS": "1",
        "A_SECRET": "hush",
    }
    command = ["make", "-s", "trainium-report", f"PYTHON={sys.executable}", f"ARGS={arguments}"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def packed(bundle: Path) -> dict[str, str]:
    """Return the text of each file in the report's archive, by its name without the top folder."""
    texts = {}
    with tarfile.open(bundle) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                texts[member.name.partition("/")[2]] = file.read().decode()
    return texts


@pytest.mark.timeout(600)
def test_tables_and_a_bundle(models: ModelDirectories, tmp_path: Path) -> None:
    config, output = tmp_path / "pair.toml", tmp_path / "report"
    config.write_text("[fused_target]\ngamma = 3\n")
    (tmp_path / "alone.toml").write_text("[target]\nmax_waiting = 5\n")
    pair = f"--target_model {models.target} --draft_model {models.related} --config {config} --output {output}"
    done = make(tmp_path, f"{pair} --baseline_config {tmp_path / 'alone.toml'} {LOAD} -- {SERVERS}")
    assert done.returncode == 0, done.stderr
    cells = json.loads((output / "results.json").read_text())
    assert [(cell["variant"], cell["kind"]) for cell in cells] == [
        (variant, kind) for kind in ("structured", "open_ended") for variant in ("without a draft", "with a draft")
    ]
    for cell in cells:
        assert 10 <= cell["number_input_tokens"]["mean"] <= 13
        assert cell["number_output_tokens"]["mean"] == 10
        assert 0 < cell["ttft_s"]["p50"] <= cell["ttft_s"]["p99"] < cell["end_to_end_latency_s"]["p99"]
        assert cell["inter_token_latency_s"]["min"] > 0
        assert cell["num_completed_requests"] == 4
        assert (cell["acceptance_rate"] is None) == (cell["variant"] == "without a draft")
    assert "Equal answers: 4 of 4." in done.stdout
    assert "| ttft_s |" in (output / "report.md").read_text()
    files = packed(tmp_path / "report.tar.gz")
    assert {"report.md", "results.json", "system.json", "target.log", "fused_target.log"} <= files.keys()
    assert "gamma = 3" in files["configs/pair.toml"]
    assert "max_waiting = 5" in files["configs/alone.toml"]
    compiled = [json.loads(text) for name, text in files.items() if name.startswith("compiled/")]
    assert sorted(made["neuron_config"]["speculation_length"] for made in compiled) == [0, 3]
    assert "NEURON_COMPILED_ARTIFACTS" in files["system.json"]
    assert not [name for name, text in files.items() if "hush" in text]


def test_a_failed_server_leaves_a_bundle(models: ModelDirectories, tmp_path: Path) -> None:
    pair = f"--target_model {models.target} --draft_model {models.related} --output {tmp_path / 'report'}"
    done = make(tmp_path, f"""{pair} {LOAD} -- {SERVERS} --neuron_config '{{"fused_qvk":true}}'""")
    assert done.returncode == 2  # make's own
    assert "fused_qvk" in packed(tmp_path / "report.tar.gz")["target.log"]
    assert "Failed:" in (tmp_path / "report" / "report.md").read_text()


def test_an_unknown_flag_ends_the_start(models: ModelDirectories, tmp_path: Path) -> None:
    pair = f"--target_model {models.target} --draft_model {models.related} --output {tmp_path / 'report'}"
    done = make(tmp_path, f"{pair} -- --max-model-len 80")
    assert "unrecognized arguments: --max-model-len" in done.stderr
    assert not (tmp_path / "report" / "target.log").exists()
