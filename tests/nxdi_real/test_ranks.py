"""Tests of compiled models on two ranks (tp_degree 2): two processes, each with half of the weights, as on devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from specdec.inference.config import ROOT
from tests.support.nxdi import PYTHON_PATH

PAIRS = ("fused", "fused on the device", "fused, scattered", "eagle", "eagle, scattered", "eagle3")

pytestmark = pytest.mark.usefixtures("on_real")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run `ranks.py` on two ranks; return the results of its checks by the checks' names."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    variables = {
        "PYTHONPATH": PYTHON_PATH,
        "OMP_NUM_THREADS": "1",
        "NEURON_RT_VISIBLE_CORES": "0-31",
    }
    done = subprocess.run(
        [*command, "-m", "tests.nxdi_real.ranks", str(folder)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result["name"]: result for result in found}


@pytest.mark.parametrize("name", ["slots", "slots, scattered"])
def test_logits_are_those_of_transformers(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["tp_degree"] == 2
    assert results[name]["error"] < 1e-3


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_gives_the_tokens_of_transformers(results: dict[str, dict[str, Any]], name: str) -> None:
    """A draft and a target in one graph, on two cores, give the tokens of Transformers.

    Regression: NxDI gathered a draft's embeddings that it had not scattered, and EAGLE failed on several cores.
    """
    assert results[name]["equal"]
