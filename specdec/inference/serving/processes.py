"""Servers of this project started in processes of their own, for the demo, the comparison and the tests.

Each process ends with the block of its context manager, even after an exception. This module needs no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.health import is_serving
from specdec.inference.config import DEFAULT_START_TIMEOUT_S, ROOT
from specdec.inference.errors import UnavailableError

STOP_TIMEOUT_S = 15.0
STILL_S = 120.0
"""Seconds without progress, that is, with neither new log nor CPU time, after which a server's start has failed."""
LOOK_S = 1.0
"""Seconds between two looks at a server that starts."""
MOVED_CPU_S = 0.5
"""CPU seconds that count as progress of a start; a server that only waits for another takes less in `STILL_S`."""
_PORTS = range(15_000, 30_000)
_start = secrets.randbelow(len(_PORTS))  # not where another process begins
_untried_ports = itertools.chain(_PORTS[_start:], _PORTS[:_start])


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """Server in a process of its own.

    Attributes:
        name: name in messages.
        address: HOST:PORT on which it listens.
        process: its process.
        log: file with its stdout and stderr.
    """

    name: str
    address: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def log_tail(self, num_lines: int | None = 5) -> str:
        """Return the last `num_lines` lines of the server's log; None returns all of it."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines if num_lines is None else lines[-num_lines:])

    @property
    def last_words(self) -> str:
        """Return the last lines of the server's log, in words that can be added to the message of an error."""
        return f"its log ends with:\n{tail}" if (tail := self.log_tail().strip()) else "its log is empty"


@dataclass(slots=True)
class Start:
    """Start of one or several servers, which may wait for each other: while any makes progress, none counts as stuck.

    Attributes:
        timeout_s: most seconds from the beginning until all are ready.
        note: function that gets a line of text about each server that becomes ready.
    """

    timeout_s: float = DEFAULT_START_TIMEOUT_S
    note: Callable[[str], None] = lambda line: None
    _began: float = field(default_factory=time.monotonic)
    _moved: float = field(default_factory=time.monotonic)
    _next: dict[int, float] = field(default_factory=dict)  # time of the next look, by process
    _marks: dict[int, tuple[int, float]] = field(default_factory=dict)  # log bytes and CPU time, by process

    @property
    def seconds(self) -> float:
        """Return the seconds since the start began."""
        return time.monotonic() - self._began

    def fault(self, server: ServerProcess) -> str:
        """Return why a server's start has failed, as the end of a sentence; empty while it has not."""
        if (code := server.process.returncode) is not None:
            return f"ended at start with code {code}"
        if self.seconds > self.timeout_s:
            return f"is not ready after {self.timeout_s:g} s (--start_timeout_s)"
        self._look(server)
        still_s = time.monotonic() - self._moved
        return f"has not started: neither its log nor its CPU time moved for {STILL_S:g} s" if still_s > STILL_S else ""

    def _look(self, server: ServerProcess) -> None:
        """Record progress if the server's log has changed since the last look, or its CPU time by `MOVED_CPU_S`."""
        now, process = time.monotonic(), server.process.pid
        if now < self._next.get(process, 0.0):
            return
        self._next[process] = now + LOOK_S
        size, cpu_s = server.log.stat().st_size, cpu_time_s(process)
        old_size, old_cpu_s = self._marks.get(process, (-1, 0.0))
        if size != old_size or abs(cpu_s - old_cpu_s) >= MOVED_CPU_S:
            self._marks[process], self._moved = (size, cpu_s), now


def cpu_time_s(process: int) -> float:
    """Return the CPU seconds that a process, given by its id, and its descendants have used since they started."""
    rows = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, *fields = file.read_text().rpartition(")")[2].split()
            rows[int(file.parent.name)] = int(parent), sum(map(int, fields[9:13]))  # own, and of children that ended
    family, size = {process}, 0
    while len(family) > size:
        size = len(family)
        family |= {number for number, (parent, _) in rows.items() if parent in family}
    return sum(ticks for number, (_, ticks) in rows.items() if number in family) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """Return a TCP port that is free now on every address; each call returns another one.

    The port is outside the range from which systems choose ports for outgoing connections, so that no connection takes
    it before the server does.

    Raises:
        UnavailableError: no port is left.
    """
    for port in _untried_ports:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise UnavailableError(f"no TCP port between {_PORTS.start} and {_PORTS.stop} is left")


async def finished_process(name: str, role: str, *flags: str) -> None:
    """Run `main.py --role ROLE FLAGS` until it ends.

    Args:
        name: name of the process in messages.

    Raises:
        UnavailableError: the process ended with an error; the message has the end of its log.
    """
    with NamedTemporaryFile(prefix=f"specdec-{name}-", suffix=".log") as log:
        process = await _started(role, *flags, log=log.fileno())
        try:
            if code := await process.wait():
                ended = ServerProcess(name, "", process, Path(log.name))
                raise UnavailableError(f"{name} ended with code {code}; {ended.last_words}")
        finally:
            await _stop(process)


@asynccontextmanager
async def server_process(
    name: str,
    role: str,
    *flags: str,
    port: int,
    cores: Sequence[int] = (),
    start: Start | None = None,
    ready_line: str | None = None,
    log_file: Path | None = None,
) -> AsyncGenerator[ServerProcess, None]:
    """Run `main.py --role ROLE FLAGS` during the block, which begins when the server is ready.

    Args:
        name: name of the server in messages.
        port: port on which the flags let it listen.
        cores: numbers of the CPU cores that it may use; empty: all.
        start: start of this server and of others that begin at the same time; None: of this one alone.
        ready_line: line that a process without a port logs when it is ready; `port` then has no meaning.
        log_file: file that keeps its log; None uses a temporary one.

    Raises:
        UnavailableError: the process ended, or made no progress; the message has the end of its log.
    """
    start = start or Start()
    with log_file.open("wb") if log_file else NamedTemporaryFile(prefix=f"specdec-{name}-", suffix=".log") as log:
        process = await _started(role, *flags, log=log.fileno())
        try:
            if cores:
                os.sched_setaffinity(process.pid, cores)
            server = ServerProcess(name, f"127.0.0.1:{port}", process, Path(log.name))
            await _until_ready(server, start, ready_line)
            start.note(f"{name} is ready after {start.seconds:.0f} s")
            yield server
        finally:
            await _stop(process)


async def _started(role: str, *flags: str, log: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *_program(),
        role,
        *flags,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def _program() -> tuple[str, ...]:
    """Return Python's arguments to run a role: the repository's script if it is there, else the installed package."""
    script = ROOT / "main.py"
    return (str(script), "--role") if script.is_file() else ("-m", "specdec")


async def _until_ready(server: ServerProcess, start: Start, ready_line: str | None) -> None:
    """Wait until the server reports SERVING to health checks, or until its log has `ready_line` if that is given.

    Raises:
        UnavailableError: the server's start has failed.
    """
    async with open_channel(server.address) as channel:
        while not (await is_serving(channel) if ready_line is None else ready_line in server.log_tail(None)):
            if fault := start.fault(server):
                raise UnavailableError(f"{server.name} {fault}; {server.last_words}")
            await asyncio.sleep(0.1)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
