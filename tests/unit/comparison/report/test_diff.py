"""Two results: a slow-down that was planted is found, equal ones are equal, unlike conditions are refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from comparison.app import main
from comparison.plan.config import PromptSet, Topology, WorkloadConfig
from comparison.report.findings import json_of
from tests.support.samples import config, findings, record, samples

SETS = (PromptSet("structured", ("1 2 3", "a b c")), PromptSet("open_ended", ("It was", "He is")))


def _measured(directory: Path, seed: int, *, fused: float = 1.0) -> Path:
    """A results.json with 3 % of noise, and `fused` times the fused pair's times."""
    directory.mkdir()
    settings = config(directory, workload=WorkloadConfig(SETS, num_runs=5))
    rng = random.Random(seed)
    noisy = []
    for sample in samples(settings):
        factor = fused if sample.cell.contender.topology is Topology.FUSED else 1.0
        cell = sample.cell
        records = (
            record(cell.contender, rtt_ms=cell.rtt_ms, prompt_index=i, slowdown=factor * rng.lognormvariate(0, 0.03))
            for i in range(len(sample.records))
        )
        noisy.append(replace(sample, records=tuple(records)))
    file = directory / "results.json"
    file.write_text(json.dumps(json_of(findings(settings, noisy))))
    return file


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _measured(tmp_path_factory.mktemp("diff") / "old", 1)


def _same_models(file: Path, other: Path) -> Path:
    """A test's models have a directory of their own each; those of a user are where they were."""
    content = json.loads(file.read_text())
    content["conditions"] = json.loads(other.read_text())["conditions"]
    file.write_text(json.dumps(content))
    return file


def _diff(*arguments: str | Path) -> int:
    return main(["diff", *map(str, arguments)])


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_of_a_shows_no_difference(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    new = _same_models(_measured(tmp_path / "new", seed), old)
    assert _diff(old, new) == 0
    assert "48 latencies compared: 48 show no difference" in capsys.readouterr().out


def test_a_planted_slowdown_is_found(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = _same_models(_measured(tmp_path / "new", 5, fused=1.2), old)
    assert _diff(old.parent, new.parent) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if "slower, by more than 5%" in line]
    assert len(rows) == 2 * 2 * 3  # kinds, round trip times, latencies
    assert all("topology fused" in row for row in rows)
    assert _diff(new, old) == 0  # the other way round it is faster
    assert "12 faster" in capsys.readouterr().out


def test_below_the_threshold_it_is_named_and_forgiven(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = _same_models(_measured(tmp_path / "new", 6, fused=1.2), old)
    assert _diff(old, new, "--threshold", "0.5") == 0
    assert "12 slower, 0 of them by more than 50%" in capsys.readouterr().out


def test_another_machine_is_refused_by_name(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(old.read_text())
    content["conditions"]["Host"] = "an abacus"
    content["warnings"] = ["The machine was busy"]
    new = tmp_path / "new.json"
    new.write_text(json.dumps({"comparison": content}))
    assert _diff(old, new) == 2
    assert "conditions differ" in (error := capsys.readouterr().err)
    assert "| an abacus" in error
    assert _diff(old, new, "--anyway") == 0
    error = capsys.readouterr().err
    assert "warning: not the same conditions: Host" in error
    assert "warning: new: The machine was busy" in error


@pytest.mark.parametrize("text", ["", "[]", '{"cells": []}'])
def test_files_that_are_no_results(old: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "new.json").write_text(text)
    assert _diff(old, tmp_path / "new.json") == 2
    assert _diff(old, tmp_path / "missing") == 2


def test_results_without_anything_in_common(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(old.read_text())
    for cell in content["statistics"]:
        cell["rtt_ms"] += 1000.0
    (tmp_path / "new.json").write_text(json.dumps(content))
    assert _diff(old, tmp_path / "new.json") == 2
    assert "no measurement in common" in capsys.readouterr().err


def test_too_few_runs_show_nothing_and_not_no_difference(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one run of each prompt there is no spread to go by. Five times slower was "no difference" then."""
    content = json.loads(old.read_text())
    content["requests"] = [[it for it in cell if it["run"] == 0] for cell in content["requests"]]
    (tmp_path / "new.json").write_text(json.dumps(content))
    assert _diff(old, tmp_path / "new.json", "--anyway") == 0
    assert "48 latencies compared: 0 show no difference, 48 have too few runs to tell" in capsys.readouterr().out


def test_what_failed_and_what_is_missing_is_said(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell in which everything failed dropped out without a word, and half of another's requests did."""
    content = json.loads(old.read_text())
    content["statistics"][0]["rtt_ms"] = 77.0
    for request in content["requests"][1][:3]:
        request["error_code"] = "UNAVAILABLE"
    (tmp_path / "new.json").write_text(json.dumps(content))
    assert _diff(old, tmp_path / "new.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "failed requests, in no latency: 0 in old, 3 in new" in lines
    assert [line[:12] for line in lines if line.startswith("only in")] == ["only in old:", "only in new:"]


@pytest.mark.parametrize("without", ["error_code", "ttft_s", "prompt"])
def test_results_of_another_version_are_refused(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], without: str
) -> None:
    """They ended in a traceback."""
    content = json.loads(old.read_text())
    for cell in content["requests"]:
        for request in cell:
            del request[without]
    (tmp_path / "new.json").write_text(json.dumps(content))
    assert _diff(old, tmp_path / "new.json") == 2
    assert f"is no result of a comparison with its requests: KeyError('{without}')" in capsys.readouterr().err
