"""The load of a machine that a report shows counts other processes, but not the measured run and its children."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.inference.observe import host_load
from specdec.inference.observe.host_load import HostLoad, LoadMeter, busy_at_start, busy_warning
from tests.support.samples import BUSY, QUIET

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("load", "spread", "is_busy"),
    [
        (QUIET, 1.1, False),
        (BUSY, 1.1, True),
        (QUIET, 2.0, True),
        (HostLoad(24.0, 24.0, 2, other_cores=0.0), 1.0, False),  # the load of an earlier run of ours
        (HostLoad(24.0, 24.0, 2, other_cores=None), 1.0, True),  # nothing else is known
        (HostLoad(0.5, 24.0, 2, other_cores=None), 1.0, False),
    ],
)
def test_foreign_load_or_spread_means_busy(load: HostLoad, spread: float, *, is_busy: bool) -> None:
    warning = busy_warning(load, spread)
    assert bool(warning) == is_busy
    assert not warning or (str(load) in warning and f"{spread:.2f}" in warning)


def test_foreign_load_excludes_our_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load of other processes excludes this process and its children.

    In this test the times of the cores are made up, and the child process is real.
    """
    stat, busy_s = tmp_path / "stat", 0.0
    monkeypatch.setattr(host_load, "_CPU_TIMES", stat)

    def write() -> None:
        row = f"{round(busy_s * TICKS)} 0 0 999 999 999 999 0 0 0"
        stat.write_text(f"cpu {row}\ncpu0 {row}\ncpu1 0 0 0 0 0 0 0 0 0 0\ncpu7 99999999 0 0 0 0 0 0 0 0 0\nintr 1\n")

    write()
    before = os.times()
    meter = LoadMeter((0, 1), is_whole=True)
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    busy_s = sum(os.times()[:4]) - sum(before[:4])
    write()
    quiet = meter.read()
    assert quiet.other_cores is not None
    busy_s += 100 * (os.times().elapsed - before.elapsed)
    write()
    busy = meter.read()
    assert busy.other_cores is not None
    assert not quiet.is_busy
    assert busy.other_cores > 50
    assert LoadMeter((0, 1), is_whole=False).read().other_cores is None
    stat.unlink()
    assert meter.read().other_cores is None


@pytest.mark.parametrize("used_s", [0.0, 1000.0])
async def test_a_busy_host_is_known_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_s: float
) -> None:
    """A busy machine is reported before a measurement, not only after it.

    `used_s` is the CPU time that other programs take meanwhile.

    Regression: a study ran for its three minutes, and only then reported that the machine had been busy.
    """
    stat = tmp_path / "stat"
    monkeypatch.setattr(host_load, "_CPU_TIMES", stat)
    stat.write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")
    looking = asyncio.create_task(busy_at_start((0,)))
    await asyncio.sleep(0)
    stat.write_text(f"cpu0 {round(used_s * TICKS)} 0 0 0 0 0 0 0 0 0\n")
    assert ("of 1 cores" in await looking) == bool(used_s)
