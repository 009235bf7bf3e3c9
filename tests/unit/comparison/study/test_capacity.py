"""The search for capacity finds the most streams (simultaneous requests) that keep the promised speed."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from specdec.comparison.plan.config import ALONE, ComparisonConfig, Topology
from specdec.comparison.plan.flags import parse_config
from specdec.comparison.plan.grid import Cell, Sample
from specdec.comparison.plan.record import RequestRecord, Round
from specdec.comparison.run.progress import Progress
from specdec.comparison.study.capacity import RESOLUTION, Capacities, Capacity, Probe, Searcher, probe_of, search
from specdec.comparison.study.capacity_report import json_of, text_of, write_capacities
from specdec.comparison.study.search import Budget
from specdec.inference.commit import Timings
from tests.support.samples import QUIET

FLAGS = ("--capacity", "32", "--slo", "itl:50ms,ttft:1s", "--topologies", "target,fused")


def config(*flags: str) -> ComparisonConfig:
    return parse_config([*FLAGS, *flags])


@given(st.integers(1, 4096), st.integers(0, 4096), st.integers(0, 5000))
def test_search_finds_the_capacity(limit: int, first: int, capacity: int) -> None:
    """The search finds the capacity, in streams, to its resolution, with at most 30 measurements and none repeated.

    `limit` is the most streams that it may try, and `first` the number that it tries first.
    """
    steps, tried = search(limit, first), list[int]()
    streams = next(steps)
    try:
        while True:
            tried.append(streams)
            streams = steps.send(streams <= capacity)
    except StopIteration as found:
        most = found.value
    assert most <= min(capacity, limit) <= most + max(1, most // RESOLUTION)
    assert len(set(tried)) == len(tried) <= 30
    assert all(1 <= each <= limit for each in tried)


def answer(rate: float, ttft_s: float) -> RequestRecord:
    """Return a record of eleven tokens, `rate` per second after the first; drafting takes 20 % of the time."""
    timings = Timings(compute_us=40_000, draft_us=10_000)
    rounds = tuple(Round(ttft_s + i / rate, 1, 3, 0, timings) for i in range(11))
    return RequestRecord(0, 0.0, 4, tuple(range(11)), rounds)


def probed(*records: RequestRecord, wanted: int = 20, failures: tuple[RequestRecord, ...] = ()) -> Probe:
    settings = config()
    (prompts,) = settings.workload.prompt_sets
    return probe_of(settings, Sample(Cell(ALONE, prompts.kind, 0.0, 20), 0, records, failures), wanted)


@pytest.mark.parametrize(("num_slow", "num_late", "holds"), [(0, 0, True), (1, 0, True), (4, 0, False), (0, 1, False)])
def test_nine_in_ten_streams_keep_the_promise(num_slow: int, num_late: int, holds: bool) -> None:
    """The promise of `--slo` holds if 9 in 10 answers are fast enough and 99 in 100 first tokens come in time.

    Of 20 answers here, `num_slow` have too few tokens per second, and `num_late` others have a late first token.
    """
    quick = [answer(30.0, 0.2)] * (20 - num_slow - num_late)
    assert probed(*quick, *[answer(10.0, 0.2)] * num_slow, *[answer(30.0, 2.0)] * num_late).holds is holds


def test_an_unfinished_stream_breaks_the_promise() -> None:
    """The promise does not hold if a stream is cut off: without its record, the other streams would look fast."""
    assert not probed(*[answer(30.0, 0.2)] * 19).holds
    assert not probed(*[answer(30.0, 0.2)] * 20, failures=(answer(30.0, 0.2),)).holds
    assert not probed().holds


def capacities(settings: ComparisonConfig, **changes: Any) -> Capacities:
    best = probed(*[answer(30.0, 0.2)] * 20)
    fused = next(it for it in settings.contenders if it.topology is Topology.FUSED)
    found = [
        Capacity(contender, 50.0, streams, (replace(best, streams=streams),), is_limit)
        for contender, streams, is_limit in ((ALONE, 4, False), (fused, 32, True))
    ]
    return Capacities(settings, tuple(found), **{"differences": (), "load": QUIET, "duration_s": 60.0, **changes})


def test_the_table_has_the_capacities_found(tmp_path: Path) -> None:
    """The report has each capacity, "at least" where more may fit, and the gain that arXiv 2606.25091 predicts."""
    page = tmp_path / "page.md"
    page.write_text(
        "# Mine\n<!-- bench: here -->\nold\n<!-- /bench -->\n<!-- bench: other -->\nkept\n<!-- /bench -->\n"
    )
    found = capacities(config("--output", str(tmp_path), "--page", f"{page}#here"))
    write_capacities(found, tmp_path)
    (fused,) = [line for line in page.read_text().splitlines() if line.startswith("| fused")]
    assert re.split(r" *\| *", fused)[1:6] == ["fused", "up to 50", "at least 32", "8.0", "200"]
    assert "here 1.25" in page.read_text().replace("\n", " ")
    assert json_of(found)["predicted_over_fused"] == 1.25
    assert "old" not in page.read_text()
    assert "kept" in page.read_text()
    assert (tmp_path / "capacity.png").stat().st_size > 1000


def test_the_table_is_written_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_capacities(capacities(config("--output", str(tmp_path))), tmp_path)
    assert "| fused" in (tmp_path / "capacity.md").read_text()
    assert not (tmp_path / "capacity.png").exists()


class SlowServers:
    """Stand-in for servers at which no answer ends; each measurement takes 4 s of the stand-in's own clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.servers = self

    def set_rtt(self, rtt_ms: float) -> None: ...

    async def steady(self, cell: Cell, _prompts: object, _limit_s: float) -> Sample:
        self.seconds += 4.0
        return Sample(cell, 0, (), ())


async def test_a_way_for_which_the_time_was_over_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topology that was not measured fully before the study's time ended is left out of the report.

    Regression: the time was over after two measurements of 65 streams, and the report had "at least 0".
    """
    servers: Any = SlowServers()
    searcher = Searcher(config("--max_new_tokens", "40"), Progress(Console(quiet=True), None))
    monkeypatch.setattr(searcher, "_budget", Budget(10.0, lambda: servers.seconds))
    await searcher.take(servers, ALONE)
    assert searcher.samples
    assert not searcher.found


def test_no_capacity_found_has_no_figures(tmp_path: Path) -> None:
    """A study that measured no capacity still writes a report, without figures of capacity.

    Regression: if the time was over before the first measurement, the picture raised ValueError, and there was no
    report.
    """
    settings = config()
    none = Capacity(ALONE, 50.0, 0, (), False)
    assert "| target    | up to 50       | 0 " in text_of(replace(capacities(settings), found=(none,)))
    write_capacities(replace(capacities(settings), found=()), tmp_path)
    assert (tmp_path / "capacity.md").read_text()
