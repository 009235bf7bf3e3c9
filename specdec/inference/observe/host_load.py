"""Load of this host by other processes around and during a run, since it makes measured figures unreliable."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CPU_TIMES = Path("/proc/stat")
_SUMMED = (0, 1, 2, 7)
"""Columns of /proc/stat that count as busy: user, nice, system, steal; not interrupts, as this run causes some."""

MAX_OTHERS = 0.1
"""Share (0 to 1) of the cores that other processes may use; a desktop or a monitoring agent takes a few per cent."""
MAX_SPREAD = 1.5
"""Speed of the fastest of equal runs over that of the slowest, from which a machine counts as unsteady; about 1.1 on a
quiet one."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Load of the host around one run.

    Attributes:
        before, after: the host's load averages over a minute, before and after the run; the second contains the run.
        num_cores: number of cores that the run may use.
        other_cores: how many of these cores other processes kept busy during the run, on average; None if unknown.
    """

    before: float
    after: float
    num_cores: int
    other_cores: float | None

    def __str__(self) -> str:
        others = "an unknown part" if self.other_cores is None else f"{self.other_cores:.2f}"
        averages = f"load average {self.before:.1f} before the run and {self.after:.1f} after it"
        return f"{averages}; other processes used {others} of {self.num_cores} cores during it"

    @property
    def is_busy(self) -> bool:
        """Return whether other processes used so much of the CPU that figures of the run are unreliable.

        If their use is unknown, the load average before the run decides, which earlier runs of this program raise too.
        """
        if self.other_cores is None:
            return self.before > self.num_cores
        return self.other_cores > MAX_OTHERS * self.num_cores

    @property
    def warning(self) -> str:
        """Return why figures of the run are unreliable; empty if the machine was quiet."""
        return f"The machine was busy: {self}. Repeat this on a quiet machine." if self.is_busy else ""


def busy_warning(load: HostLoad, spread: float) -> str:
    """Return why a run's figures are unreliable; empty if the machine was quiet and steady.

    Args:
        load: load of the host during the run.
        spread: speed of the fastest of equal runs over that of the slowest.
    """
    if not load.is_busy and spread < MAX_SPREAD:
        return ""
    differing = f"equal runs differ by a factor of {spread:.2f}"
    return f"The machine was busy or unsteady: {load}; {differing}. Repeat this on a quiet machine."


async def busy_at_start(cores: Sequence[int]) -> str:
    """Watch the host for half a second; return why a run that begins now will be unreliable, empty if it is quiet."""
    meter = LoadMeter(cores, is_whole=True)
    await asyncio.sleep(_LOOK_S)
    load = meter.read()
    if not load.is_busy:
        return ""
    used = "" if load.other_cores is None else f"other processes use {load.other_cores:.1f} of {load.num_cores} cores, "
    return f"The machine is busy: {used}load average {load.before:.1f}."


_LOOK_S = 0.5
"""Seconds for which the host is observed before a run."""


def load_average() -> float:
    """Return the host's load average over the last minute."""
    return round(os.getloadavg()[0], 2)


class LoadMeter:
    """Meter of the host's load, from its construction to `read`.

    Processes that this one started count as part of the run once they have ended, so they must end before `read`.

    Args:
        cores: numbers of the cores that the run may use.
        is_whole: True if all processes of the run are started by this one. If not, they could not be told from other
            processes, so the use by others is unknown.
    """

    def __init__(self, cores: Sequence[int], *, is_whole: bool) -> None:
        self._cores = cores
        self._before = load_average()
        self._times = self._read_times() if is_whole else None

    def read(self) -> HostLoad:
        others, now = None, self._read_times()
        if self._times and now:
            busy_s, own_s, elapsed_s = (late - early for late, early in zip(now, self._times, strict=True))
            others = max(0.0, busy_s - own_s) / max(elapsed_s, 1e-9)
        return HostLoad(self._before, load_average(), len(self._cores), others)

    def _read_times(self) -> tuple[float, float, float] | None:
        """Return three numbers of seconds, of which only differences between two calls mean anything.

        They are the CPU time of all processes on these cores, the CPU time of this process and of its children that
        have ended, and the real time. None if the system has no /proc/stat.
        """
        try:
            rows = [line.split() for line in _CPU_TIMES.read_text().splitlines()]
        except OSError:  # not Linux
            return None
        names = {f"cpu{core}" for core in self._cores}
        ticks = sum(int(row[1 + column]) for row in rows if row and row[0] in names for column in _SUMMED)
        *own_s, elapsed_s = os.times()
        return ticks / os.sysconf("SC_CLK_TCK"), sum(own_s), elapsed_s
