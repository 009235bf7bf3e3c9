"""The life of a server: it tries ports before slow work, drains at one signal, and ends at a second one."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from specdec.inference.config import ROOT, HttpConfig, ObserveConfig, PortSecurity, ServerConfig
from specdec.inference.errors import ConfigError, UnavailableError
from specdec.inference.serving import host as host_module
from specdec.inference.serving.fronts import check_ports
from specdec.inference.serving.host import Host
from specdec.inference.serving.processes import free_port
from tests.support import scripted


def test_a_taken_port_is_named_whichever_it_is() -> None:
    """A port that is taken is an error before the model loads.

    It was once otherwise: a server loaded its model for minutes before it found a port taken.
    """
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        for config in (
            (ServerConfig(port=taken), ObserveConfig("target"), None),
            (ServerConfig(port=0), ObserveConfig("target", metrics_port=taken), None),
            (ServerConfig(port=0), ObserveConfig("target"), HttpConfig(taken)),
        ):
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken}: .*, or take another port"):
                check_ports(*config)


def test_one_port_for_two_things_is_found_at_once() -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        check_ports(ServerConfig(port=port), ObserveConfig("target", metrics_port=port))


def test_free_ports_stay_free() -> None:
    port = free_port()
    for _ in range(2):
        check_ports(ServerConfig(port=port), ObserveConfig("target", metrics_port=0), HttpConfig(free_port()))


class Recorder:
    """A front and a work that record the calls of their methods."""

    fault = broken = None
    hangs = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def report(self, *, ready: bool, alive: bool = True) -> None:
        self.told.append("report")

    async def open(self) -> None:
        self.told.append("open")

    @property
    def ports(self) -> dict[str, int]:
        return {"grpc": 1}

    async def refuse_new(self) -> None:
        self.told.append("refuse")

    async def close(self) -> None:
        self.told.append("close")

    async def stop(self, *, grace_s: float) -> None:
        self.told.append(f"stop {grace_s:g}")


async def test_one_order_of_draining() -> None:
    recorder, ended = Recorder(), asyncio.Event()

    async def until() -> None:
        await ended.wait()

    host = Host(recorder, [recorder, recorder], config=ServerConfig(grace_s=3.0))
    serving = asyncio.create_task(host.run(until()))
    await asyncio.sleep(0.01)
    assert recorder.told == ["open", "open"]
    ended.set()
    await serving
    assert recorder.told[2:] == ["report", "report", "refuse", "refuse", "stop 3", "close", "close"]


async def test_a_first_wait_is_no_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first wait for a target logs no warning.

    It was once otherwise: a normal start of `--attach` logged two warnings, not ready and ready again.
    """
    monkeypatch.setattr(host_module, "WATCH_S", 0.01)
    recorder = Recorder()
    recorder.fault = "no target yet"  # type: ignore[assignment]
    caplog.set_level(logging.INFO, "specdec.inference.serving.host")

    def logged() -> list[tuple[str, str]]:
        return [(record.levelname, record.getMessage()) for record in caplog.records if "ready" in record.getMessage()]

    async def until() -> None:
        for num_lines, fault in ((1, None), (2, "lost"), (3, None)):
            await scripted.until(lambda num_lines=num_lines: len(logged()) >= num_lines)  # type: ignore[misc]
            recorder.fault = fault  # type: ignore[assignment]
        await scripted.until(lambda: len(logged()) >= 4)

    await Host(recorder, [recorder], config=ServerConfig(grace_s=0.0)).run(until())
    first, later = logged()[:2], logged()[2:]
    assert first == [("INFO", "not ready: no target yet"), ("INFO", "ready")]
    assert later == [("WARNING", "not ready: lost"), ("WARNING", "ready again")]


async def test_loaded_objects_are_not_searched_for_garbage() -> None:
    """The garbage collector does not search objects that were loaded at the start.

    It was once otherwise: each full garbage collection searched all objects ever loaded, and stopped the loop for 40
    ms.
    """
    num_frozen = []

    async def until() -> None:
        num_frozen.append(gc.get_freeze_count())

    await Host(Recorder(), config=ServerConfig()).run(until())
    assert num_frozen[0] > 1000
    assert gc.get_freeze_count() == 0


async def test_failed_work_ends_the_host() -> None:
    recorder = Recorder()

    async def until() -> None:
        raise UnavailableError("every target refuses")

    with pytest.raises(UnavailableError, match="every target refuses"):
        await Host(recorder, [recorder], config=ServerConfig(grace_s=0.0)).run(until())
    assert recorder.told == ["open", "close"]


async def test_a_watch_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server ends with an error if the watch of its work ends.

    It was once otherwise: after an error in the watch of its work, a server ended with exit code 0.
    """

    async def fail(self: Host) -> None:
        raise RuntimeError("no such figure")

    monkeypatch.setattr(Host, "_watch", fail)
    with pytest.raises(RuntimeError, match="no such figure"):
        await Host(Recorder(), config=ServerConfig(grace_s=0.0)).run()


Streams: TypeAlias = tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader]
STUCK = """
import asyncio, logging, sys
from specdec.inference.config import ServerConfig
from specdec.inference.serving.host import Host

class Stuck:
    fault = broken = None
    hangs = False

    async def stop(self, *, grace_s):
        print("draining", flush=True)
        await asyncio.sleep(600)

async def main():
    asyncio.get_running_loop().call_later(0.1, lambda: print("serving", flush=True))
    await Host(Stuck(), config=ServerConfig(grace_s=600)).run()

logging.basicConfig(stream=sys.stderr, level="INFO", format="%(message)s")
asyncio.run(main())
"""


@asynccontextmanager
async def stuck(
    tmp_path: Path, source: str = STUCK
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, Streams], None]:
    """Run a host that does not end by itself; yield its process and its output streams."""
    script = tmp_path / "stuck.py"
    script.write_text(source)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield process, (process.stdin, process.stdout, process.stderr)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_at_once_with_one_line(number: signal.Signals, tmp_path: Path) -> None:
    """A second signal ends a drain at once, with one line in the log."""
    async with stuck(tmp_path) as (process, (_, output, errors)):
        assert await output.readline() == b"serving\n"
        process.send_signal(number)
        assert await output.readline() == b"draining\n"
        process.send_signal(number)
        async with asyncio.timeout(60):
            first, last = (await errors.read()).decode().splitlines()
            assert await process.wait() == 128 + number
    assert "a second signal ends at once" in first
    assert last == f"{number.name} again: ended at once"


@pytest.mark.parametrize(
    ("host", "ours"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("h", False)],
)
def test_addresses_that_other_machines_cannot_dial(host: str, ours: bool) -> None:
    assert ServerConfig(host, security=PortSecurity(insecure=True)).on_loopback is ours


async def test_the_end_of_stdin_is_no_signal(tmp_path: Path) -> None:
    """A drain that begins with the end of stdin goes on after a SIGTERM, as a pod gets it at its deletion."""
    source = STUCK.replace("grace_s=600)", 'grace_s=600, lifeline="stdin", ready_json=True)')
    async with stuck(tmp_path, source) as (process, (lifeline, output, errors)):
        ready = json.loads(await output.readline())
        assert ready == {"ready": True, "pid": process.pid, "host": "127.0.0.1", "ports": {}}
        assert await output.readline() == b"serving\n"
        lifeline.close()
        assert await output.readline() == b"draining\n"
        assert b"the end of stdin" in await errors.readline()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.wait(), timeout=0.2)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 128 + signal.SIGTERM
