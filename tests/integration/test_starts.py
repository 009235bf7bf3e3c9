"""Tests of servers that start slowly, hang or fail to start: how long they are waited for, and the error's text."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specdec.inference.errors import UnavailableError
from specdec.inference.serving import processes
from specdec.inference.serving.processes import ServerProcess, Start, cpu_time_s, free_port, server_process

CLIMB = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
"""Program that waits for its child, which uses CPU time, as a compiler would."""
TALK = "import time\nwhile True: print('still here', flush=True); time.sleep(0.05)"
WAIT = "import time; time.sleep(600)"


@asynccontextmanager
async def running(folder: Path, name: str, program: str) -> AsyncGenerator[ServerProcess, None]:
    """Run a Python program as if it were a server; yield it, and kill it with its children at the end."""
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield ServerProcess(name, f"127.0.0.1:{free_port()}", process, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `Start` look every 50 ms, and take a server for hung that shows no progress for two seconds."""
    monkeypatch.setattr(processes, "STILL_S", 2.0)
    monkeypatch.setattr(processes, "LOOK_S", 0.05)
    monkeypatch.setattr(processes, "MOVED_CPU_S", 0.01)


async def fault_of(start: Start, *servers: ServerProcess, until_s: float = 60.0) -> str:
    """Look at starting servers until one has failed; return its fault, or "" if none has after `until_s` seconds."""
    while start.seconds < until_s:
        for server in servers:
            if fault := start.fault(server):
                return fault
        await asyncio.sleep(0.02)
    return ""


@pytest.mark.parametrize("program", [CLIMB, TALK], ids=["CPU time of a child", "log"])
@pytest.mark.usefixtures("impatient")
async def test_a_start_that_gets_on_is_waited_for(tmp_path: Path, program: str) -> None:
    """Servers may take up to the time limit to start while any of them makes progress, by log lines or CPU time.

    A server that makes none is then not taken for hung. Regression: every start ended after 120 s, and no flag changed
    that.
    """
    async with running(tmp_path, "slow", program) as slow, running(tmp_path, "waits", WAIT) as waits:
        start = Start(timeout_s=4.0)
        assert await fault_of(start, slow, waits, until_s=3.5) == ""
        assert await fault_of(start, slow, waits) == "is not ready after 4 s (--start_timeout_s)"


@pytest.mark.usefixtures("impatient")
async def test_a_start_that_stands_still_ends(tmp_path: Path) -> None:
    async with running(tmp_path, "waits", WAIT) as waits:
        assert await fault_of(Start(), waits) == "has not started: neither its log nor its CPU time moved for 2 s"


async def test_cpu_time_is_that_of_a_process_and_all_below(tmp_path: Path) -> None:
    async with running(tmp_path, "climbs", CLIMB) as climbs:
        first = cpu_time_s(climbs.process.pid)
        while cpu_time_s(climbs.process.pid) < first + 0.2:
            assert climbs.process.returncode is None
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--log_level", "error"), "is not ready after 0.01 s (--start_timeout_s); its log is empty"),
        (("--no_such_flag",), "ended at start with code 2; its log ends with:\n"),
    ],
)
async def test_an_error_of_a_start_never_ends_at_a_colon(flags: tuple[str, ...], words: str) -> None:
    """The error about a server that failed at its start has the end of its log, or says that the log is empty.

    Regression: the error was `error: target is not ready after 120 s:`, and an empty line.
    """
    port, lines = free_port(), list[str]()
    start = Start(60.0 if "code" in words else 0.01, lines.append)
    with pytest.raises(UnavailableError) as caught:
        async with server_process("target", "target", "--port", str(port), *flags, port=port, start=start):
            pass
    assert f"target {words}" in str(caught.value)
    assert not str(caught.value).rstrip().endswith(":")
    assert lines == []


@pytest.mark.slow
async def test_every_server_that_is_ready_has_a_line() -> None:
    port, lines = free_port(), list[str]()
    flags = ("--port", str(port), "--threads", "1")
    async with server_process("target", "target", *flags, port=port, start=Start(note=lines.append)):
        (line,) = lines
    assert line.startswith("target is ready after ")
