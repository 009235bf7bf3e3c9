"""`diff` of two comparisons: finds a slowdown, finds none in equal results, refuses results of other conditions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specdec.comparison.app import main
from specdec.comparison.plan.config import PromptSet, Topology, WorkloadConfig
from specdec.comparison.plan.grid import Sample
from specdec.comparison.report.findings import json_of
from tests.support.samples import changed, config, slowed

SETS = (PromptSet("structured", ("1 2 3", "a b c")), PromptSet("open_ended", ("It was", "He is")))


def _measured(directory: Path, seed: int, *, fused: float = 1.0) -> Path:
    """Write a results.json of times scattered by 3 %, with those of the fused pair multiplied by `fused`.

    Args:
        directory: the new folder of the file.
        seed: of the scatter.

    Returns:
        The path of the file.
    """
    directory.mkdir()
    rng = random.Random(seed)

    def noisy(sample: Sample) -> Sample:
        factor = fused if sample.cell.contender.topology is Topology.FUSED else 1.0
        return slowed(sample, *(factor * rng.lognormvariate(0, 0.03) for _ in sample.records))

    found = changed(config(directory, workload=WorkloadConfig(SETS, num_runs=5)), noisy)
    file = directory / "results.json"
    file.write_text(json.dumps(json_of(found)))
    return file


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _measured(tmp_path_factory.mktemp("diff") / "old", 1)


def _same_models(file: Path, other: Path) -> Path:
    """Give the results in `file` the conditions of `other`, so that both name the same models; return `file`."""
    content = json.loads(file.read_text())
    content["conditions"] = json.loads(other.read_text())["conditions"]
    file.write_text(json.dumps(content))
    return file


def _diff(*arguments: str | Path) -> int:
    return main(["diff", *map(str, arguments)])


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_equal_servers_show_no_difference(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    new = _same_models(_measured(tmp_path / "new", seed), old)
    assert _diff(old, new) == 0
    assert "48 latencies compared: 48 show no difference" in capsys.readouterr().out


def test_a_planted_slowdown_is_found(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slowdown above the threshold gives exit code 1; a smaller one is only a line in the table."""
    new = _same_models(_measured(tmp_path / "new", 5, fused=1.2), old)
    assert _diff(old.parent, new.parent) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if "slower, by more than 5%" in line]
    assert len(rows) == 2 * 2 * 3  # kinds, round trip times, latencies
    assert all("topology fused" in row for row in rows)
    assert _diff(new, old) == 0  # the other way round it is faster
    assert "12 faster" in capsys.readouterr().out
    assert _diff(old, new, "--threshold", "0.5") == 0
    assert "12 slower, 0 of them by more than 50%" in capsys.readouterr().out


def on_another_machine(content: dict[str, Any]) -> object:
    content["conditions"]["Host"] = "an abacus"
    content["warnings"] = ["The machine was busy"]
    return {"comparison": content}  # as make bench writes it


def far_away(content: dict[str, Any]) -> object:
    for cell in content["statistics"]:
        cell["rtt_ms"] += 1000.0
    return content


def of_one_run(content: dict[str, Any]) -> object:
    content["requests"] = [[it for it in cell if it["run"] == 0] for cell in content["requests"]]
    return content


def with_failures(content: dict[str, Any]) -> object:
    content["statistics"][0]["rtt_ms"] = 77.0
    for request in content["requests"][1][:3]:
        request["error_code"] = "UNAVAILABLE"
    return content


def without(name: str, content: dict[str, Any]) -> object:
    """Remove the field `name` from every request of the results; return the results."""
    content["requests"] = [[{key: it[key] for key in it if key != name} for it in cell] for cell in content["requests"]]
    return content


NO_RESULTS = ("is not a result of a comparison with its requests",)
ANYWAY = ("warning: not the same conditions: Host", "warning: new: The machine was busy")
TOO_FEW = "48 latencies compared: 0 show no difference, 48 have too few runs to tell"


@pytest.mark.parametrize(
    ("change", "flags", "code", "words"),
    [
        (on_another_machine, [], 2, ("conditions differ", "| an abacus")),
        (on_another_machine, ["--anyway"], 0, ANYWAY),
        (far_away, [], 2, ("no measurement in common",)),
        # One run of each prompt has no spread: five times slower was "no difference" then.
        (of_one_run, ["--anyway"], 0, (TOO_FEW,)),
        # Cells in which everything failed, and half of another one's requests, dropped out without a word.
        (with_failures, [], 0, ("failed requests, in no latency: 0 in old, 3 in new", "only in old:", "only in new:")),
        *(
            (partial(without, it), [], 2, (*NO_RESULTS, f"KeyError('{it}')"))
            for it in ("error_code", "ttft_s", "prompt")
        ),
        (lambda _: [], [], 2, NO_RESULTS),
        (lambda _: {"cells": []}, [], 2, NO_RESULTS),
    ],
)
def test_diff_names_results_that_cannot_be_compared(
    old: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], object],
    flags: list[str],
    code: int,
    words: tuple[str, ...],
) -> None:
    file = tmp_path / "new.json"
    file.write_text(json.dumps(change(json.loads(old.read_text()))))
    assert _diff(old, file, *flags) == code
    captured = capsys.readouterr()
    assert all(each in captured.out + captured.err for each in words)


def test_a_missing_or_empty_file_is_no_result(old: Path, tmp_path: Path) -> None:
    (tmp_path / "new.json").touch()
    assert [_diff(old, tmp_path / name) for name in ("new.json", "missing")] == [2, 2]
