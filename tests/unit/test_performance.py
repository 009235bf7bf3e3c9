"""The documentation pages generated from docs/performance.json have the figures of that file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import MEASURED_APART, PAGES, generated, measured, part
from benchmarks.report import write
from benchmarks.suite import SET
from specdec.comparison.report.markdown import PART


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return dict(measured())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_have_the_files_figures(page: Path, bench: dict[str, Any]) -> None:
    text = page.read_text()
    assert PART.search(text)
    assert generated(text, bench) == text, "python -m benchmarks.page"


def test_every_benchmark_of_the_set_is_shown(bench: dict[str, Any]) -> None:
    shown = {name for page in PAGES for _, name, _ in PART.findall(page.read_text())}
    assert shown == {*SET, "machine", "comparison", "headline", *MEASURED_APART}
    assert all(bench[name]["tables"] for name in SET)


def test_missing_measurements_are_named(bench: dict[str, Any]) -> None:
    without = {name: value for name, value in bench.items() if name not in MEASURED_APART}
    assert {part(name, without) for name in MEASURED_APART} == {"Not measured yet."}


def test_a_busy_machine_is_named(bench: dict[str, Any]) -> None:
    assert "was busy" in part("machine", {**bench, "load_before": 4.0 * bench["machine"]["cores"]})
    assert "was quiet" in part("machine", {**bench, "load_before": 0.0})


def test_the_file_is_json_with_a_line_per_benchmark(tmp_path: Path) -> None:
    write({"machine": {"cores": 2}, "passes": {"tables": ["|"]}}, tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == {"machine": {"cores": 2}, "passes": {"tables": ["|"]}}
    assert len((tmp_path / "bench.json").read_text().splitlines()) == 4
