"""The table of load has a row per cell, and names the cells in which a draft makes the target slower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from comparison.plan.config import PromptSet, Topology, WorkloadConfig
from comparison.plan.machine import split_into_machines
from comparison.report.markdown import page_part
from comparison.report.table import load_table
from inference.errors import ConfigError
from inference.request import Schedule
from tests.support.samples import config, findings, record, samples


@pytest.mark.parametrize(("slowdown", "told"), [(1.0, "6 of 6 medians"), (3.0, "4 of 6 medians")])
def test_slow_cells_are_named(tmp_path: Path, slowdown: float, told: str) -> None:
    """Only the pool is slowed down. Rounds, which wait for the network, are left out."""
    workload = WorkloadConfig((PromptSet("structured", ("1 2 3",)),), num_runs=2, concurrencies=(1, 4))
    settings = config(tmp_path, workload=workload, schedules=(Schedule.SYNC, Schedule.ASYNC))
    settings = replace(settings, network=replace(settings.network, rtts_ms=(0.0,)))
    measured = [
        replace(sample, records=(record(sample.cell.contender, slowdown=slowdown),))
        if sample.cell.contender.topology is Topology.POOL
        else sample
        for sample in samples(settings)
    ]
    text = load_table(findings(settings, measured))
    assert told in text
    assert ("pool, structured, concurrency 4: 0." in text.replace("\n", " ")) is (slowdown > 1)
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 2 + len(settings.contenders) * 2


def test_starved_machines_share_a_core() -> None:
    machines = split_into_machines(("target side", "edge"), (3, 5), cores_per_machine=0)
    assert [machine.cores for machine in machines] == [(3,), (3,)]
    with pytest.raises(ConfigError, match="cores_per_machine -1 is below 0"):
        split_into_machines(("edge",), (3, 5), cores_per_machine=-1)


@pytest.mark.parametrize(("place", "message"), [("gone.md#a", "cannot be read"), ("page.md#b", "has the parts a,")])
def test_a_page_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, message: str) -> None:
    """A comparison of minutes would else end without its page."""
    monkeypatch.chdir(tmp_path)
    Path("page.md").write_text("<!-- bench: a -->\n<!-- /bench -->\n")
    assert page_part("page.md#a") == (Path("page.md"), "a")
    with pytest.raises(ConfigError, match=message):
        page_part(place)
