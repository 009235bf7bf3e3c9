"""A process's memory, file descriptors, threads and waits for a core, as the Linux kernel counts them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Vitals:
    """Memory, file descriptors and threads of a process at one time; sizes are in MiB.

    Attributes:
        rss_mib: resident memory.
        peak_mib: most resident memory since `reset_peak`, or since the process's start.
        own_mib: resident memory without pages of files, which the kernel can drop.
        num_fds: number of open file descriptors.
        num_threads: number of threads.
    """

    rss_mib: float
    peak_mib: float
    own_mib: float
    num_fds: int
    num_threads: int


def vitals(pid: int) -> Vitals:
    """Return the memory, file descriptors and threads of the process `pid` at this moment.

    Raises:
        FileNotFoundError: the process has ended.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    rss, peak, own = (int(status[name][0]) / 1024 for name in ("VmRSS", "VmHWM", "RssAnon"))
    num_fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Vitals(rss, peak, own, num_fds, int(status["Threads"][0]))


def reset_peak(pid: int) -> None:
    """Make `peak_mib` of the process `pid` count from its present memory on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def waited_s(pid: int) -> dict[int, float]:
    """Return the seconds that each thread of the process `pid` has waited for a core while it could run, by thread id.

    Raises:
        FileNotFoundError: the process has ended.
    """
    waits = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            waits[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waits
