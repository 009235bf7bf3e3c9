"""Server processes of this project, for the demo, the comparison and the tests.

Each ends with its context manager, even after an exception. Needs no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.health import is_serving
from specdec.inference.config import ROOT
from specdec.inference.errors import UnavailableError

STOP_TIMEOUT_S = 15.0
_PORTS = range(15_000, 30_000)
_start = secrets.randbelow(len(_PORTS))  # not where another process begins
_untried_ports = itertools.chain(_PORTS[_start:], _PORTS[:_start])


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server.

    Attributes:
        name: name in messages.
        address: HOST:PORT it listens on.
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

    Raises:
        UnavailableError: the process ended with an error; the message has the end of its log.
    """
    with NamedTemporaryFile(prefix=f"specdec-{name}-", suffix=".log") as log:
        process = await _started(role, *flags, log=log.fileno())
        try:
            if code := await process.wait():
                tail = ServerProcess(name, "", process, Path(log.name)).log_tail()
                raise UnavailableError(f"{name} ended with code {code}:\n{tail}")
        finally:
            await _stop(process)


@asynccontextmanager
async def server_process(
    name: str,
    role: str,
    *flags: str,
    port: int,
    cores: Sequence[int] = (),
    ready_timeout_s: float = 120.0,
    ready_line: str | None = None,
    log_file: Path | None = None,
) -> AsyncGenerator[ServerProcess, None]:
    """Run `main.py --role ROLE FLAGS` until the block is left.

    Args:
        port: port that the flags make it listen on.
        cores: CPU cores to pin it to; empty means all.
        ready_line: line that a process without a port logs when it is ready; `port` then has no meaning.
        log_file: file that keeps its log; None uses a temporary one.

    Raises:
        UnavailableError: the process ended, or was not SERVING in time; the message has the end of its log.
    """
    with log_file.open("wb") if log_file else NamedTemporaryFile(prefix=f"specdec-{name}-", suffix=".log") as log:
        process = await _started(role, *flags, log=log.fileno())
        try:
            if cores:
                os.sched_setaffinity(process.pid, cores)
            server = ServerProcess(name, f"127.0.0.1:{port}", process, Path(log.name))
            await _until_ready(server, ready_timeout_s, ready_line)
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
    """Return how Python runs a role: the repository's script, or the installed package."""
    script = ROOT / "main.py"
    return (str(script), "--role") if script.is_file() else ("-m", "specdec")


async def _until_ready(server: ServerProcess, timeout_s: float, ready_line: str | None) -> None:
    try:
        async with asyncio.timeout(timeout_s), open_channel(server.address) as channel:
            while not (await is_serving(channel) if ready_line is None else ready_line in server.log_tail(None)):
                if server.process.returncode is not None:
                    raise UnavailableError(f"{server.name} ended at start:\n{server.log_tail()}")
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise UnavailableError(f"{server.name} is not ready after {timeout_s:g} s:\n{server.log_tail()}") from None


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
