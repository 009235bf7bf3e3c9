"""A server's process takes its ports before slow work, reports health, drains at a signal, and ends at a second one.

If something breaks or hangs, the process reports it, and ends all the same.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from specdec.inference.config import ROOT, HttpConfig, ObserveConfig, PortSecurity, ServerConfig
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import ConfigError, InternalError, UnavailableError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import GenerationRequest
from specdec.inference.serving import fronts, signals
from specdec.inference.serving import host as host_module
from specdec.inference.serving.fronts import check_ports
from specdec.inference.serving.host import Host
from specdec.inference.serving.processes import free_port
from tests.support.answers import commits_of
from tests.support.scripted import ScriptedDecoder, until


def test_a_taken_port_is_named_whichever_it_is() -> None:
    """A port that is taken is an error before the model loads.

    Regression: a server loaded its model for minutes before it found a port taken.
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


def test_traces_of_http_that_fastapi_cannot_make_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server refuses to trace HTTP requests if its FastAPI cannot, as the older version that vLLM requires."""
    http, traced = HttpConfig(free_port()), ObserveConfig("target", otlp_endpoint="http://localhost:4317")
    check_ports(ServerConfig(port=free_port()), traced, http)
    monkeypatch.setattr(fronts, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"newer FastAPI than .* leave one of them out"):
        check_ports(ServerConfig(port=free_port()), traced, http)
    check_ports(ServerConfig(port=free_port()), traced)


def test_free_ports_stay_free() -> None:
    port = free_port()
    for _ in range(2):
        check_ports(ServerConfig(port=port), ObserveConfig("target", metrics_port=0), HttpConfig(free_port()))


class Recorder:
    """Stand-in for a server's ports and for its engine; records the calls of its methods, and their times."""

    ports = {"grpc": 1}
    hangs = False
    fault: str | None = None
    broken: str | None = None

    def __init__(self) -> None:
        self.told: list[str] = []
        self.at: list[float] = []
        self.may_end = asyncio.Event()
        self.may_end.set()

    def _note(self, word: str) -> None:
        self.told.append(word)
        self.at.append(time.monotonic())

    def report(self, *, ready: bool, alive: bool = True) -> None:
        self._note(f"ready={ready} alive={alive}")

    async def open(self) -> None:
        self._note("open")

    async def refuse_new(self) -> None:
        self._note("refuse")

    async def close(self) -> None:
        self._note("close")

    async def stop(self, *, grace_s: float) -> None:
        self._note(f"stop {grace_s:g}")
        await self.may_end.wait()


async def test_a_host_refuses_then_waits_then_closes() -> None:
    recorder, ended = Recorder(), asyncio.Event()

    async def end() -> None:
        await ended.wait()

    host = Host(recorder, [recorder, recorder], config=ServerConfig(grace_s=3.0))
    serving = asyncio.create_task(host.run(end()))
    await asyncio.sleep(0.01)
    assert recorder.told == ["open", "open"]
    ended.set()
    await serving
    assert recorder.told[2:] == ["ready=False alive=True"] * 2 + ["refuse", "refuse", "stop 3", "close", "close"]


async def test_a_first_wait_is_no_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first wait of a draft worker for its target is logged as information, not as a warning.

    Regression: a normal start of `draft --attach` logged two warnings, not ready and ready again.
    """
    monkeypatch.setattr(host_module, "WATCH_S", 0.01)
    recorder = Recorder()
    recorder.fault = "no target yet"
    caplog.set_level(logging.INFO, "specdec.inference.serving.host")

    def logged() -> list[tuple[str, str]]:
        return [(record.levelname, record.getMessage()) for record in caplog.records if "ready" in record.getMessage()]

    async def end() -> None:
        for num_lines, fault in ((1, None), (2, "lost"), (3, None)):
            await until(lambda num_lines=num_lines: len(logged()) >= num_lines)  # type: ignore[misc]
            recorder.fault = fault
        await until(lambda: len(logged()) >= 4)

    await Host(recorder, [recorder], config=ServerConfig(grace_s=0.0)).run(end())
    first, later = logged()[:2], logged()[2:]
    assert first == [("INFO", "not ready: no target yet"), ("INFO", "ready")]
    assert later == [("WARNING", "not ready: lost"), ("WARNING", "ready again")]


async def test_loaded_objects_are_not_searched_for_garbage(unfrozen: list[bool]) -> None:
    """The garbage collector does not search objects that were loaded at the start.

    Regression: each full garbage collection searched all objects ever loaded, and stopped the loop for 40
    ms.
    """
    loaded = Recorder()

    async def end() -> None:
        assert all(found is not loaded for found in gc.get_objects())
        assert not unfrozen

    await Host(loaded, config=ServerConfig()).run(end())
    assert unfrozen


async def test_failed_work_ends_the_host() -> None:
    recorder = Recorder()

    async def end() -> None:
        raise UnavailableError("every target refuses")

    with pytest.raises(UnavailableError, match="every target refuses"):
        await Host(recorder, [recorder], config=ServerConfig(grace_s=0.0)).run(end())
    assert recorder.told == ["open", "close"]


async def test_a_watch_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server ends with an error if the task that watches its engine fails.

    Regression: after such an error a server ended with exit code 0.
    """

    async def fail(self: Host) -> None:
        raise RuntimeError("no such figure")

    monkeypatch.setattr(Host, "_watch", fail)
    with pytest.raises(RuntimeError, match="no such figure"):
        await Host(Recorder(), config=ServerConfig(grace_s=0.0)).run()


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which the time is added whenever the host would end its process by force."""
    times: list[float] = []
    monkeypatch.setattr(signals, "_end", lambda *_: times.append(time.monotonic()))
    return times


async def hosted(
    decoder: ScriptedDecoder, *, drain_delay_s: float = 0.0, pass_timeout_s: float = 60.0
) -> tuple[TargetEngine, Recorder, asyncio.Task[None]]:
    """Run a Host of an engine over `decoder`; return (the engine, a recorder of the Host's calls, the Host's task)."""
    engine, front = TargetEngine(decoder, EngineLimits(pass_timeout_s=pass_timeout_s)), Recorder()
    engine.start()
    config = ServerConfig(grace_s=0.1, drain_delay_s=drain_delay_s)
    running = asyncio.create_task(Host(engine, [front], config=config).run())
    await until(lambda: front.told == ["open"])
    return engine, front, running


async def test_draining_is_reported_before_requests_are_refused(forced: list[float]) -> None:
    """A server that drains (will end) reports NOT_SERVING for a time before it refuses requests.

    Regression: it did both at once, so load balancers that had not noticed yet lost requests.
    """
    engine, front, running = await hosted(ScriptedDecoder(), drain_delay_s=0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: front.told[-1] == "ready=False alive=True")
    request = GenerationRequest((1, 2), max_new_tokens=2)
    assert [commit.position for commit in await commits_of(engine.generate(request))] == [2, 3]  # still served
    await running
    assert front.told == ["open", "ready=False alive=True", "refuse", "close"]
    assert front.at[2] - front.at[1] >= 0.5
    assert forced == []


async def test_a_broken_engine_ends_the_process_with_an_error(forced: list[float]) -> None:
    """A server whose engine is broken drains, and ends with an error.

    Regression: it reported SERVING for ever, and so was not restarted.
    """
    engine, front, running = await hosted(decoder := ScriptedDecoder())
    decoder.gate.fail(RuntimeError("the device is gone"), times=100)
    for _ in range(8):
        with pytest.raises(Exception, match=r"failed|row"):
            _ = await commits_of(engine.generate(GenerationRequest((1, 2))))
    async with asyncio.timeout(60):
        with pytest.raises(InternalError, match="in a row"):
            await running
    assert front.told == ["open", "ready=False alive=False", "refuse", "close"]


async def test_a_hanging_pass_makes_the_server_unready(monkeypatch: pytest.MonkeyPatch, forced: list[float]) -> None:
    monkeypatch.setattr(host_module, "FORCE_AFTER_S", 0.5)
    engine, front, running = await hosted(decoder := ScriptedDecoder(), pass_timeout_s=0.1)
    decoder.gate.close()
    try:
        session = engine.open(GenerationRequest((1, 2)))
        await until(lambda: front.told[-1:] == ["ready=False alive=False"])
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            with pytest.raises(InternalError, match="still running"):
                await running
            await until(lambda: forced != [])  # the interpreter would wait for the pass
        engine.close(session)
    finally:
        decoder.gate.open()


async def test_a_pass_whose_sessions_have_gone_elsewhere_may_end(forced: list[float]) -> None:
    """A draining server lets its last pass end, and exits with code 0, even if all sessions of the pass have left.

    Regression: if all requests moved to other servers during their last pass, the process ended with code 1.
    """
    engine, front, running = await hosted(decoder := ScriptedDecoder())
    decoder.gate.close()
    session = engine.open(GenerationRequest((1, 2)))
    await until(lambda: engine._thread.began is not None)
    engine.close(session)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: front.told[-1:] == ["refuse"])
    await asyncio.sleep(0.1)
    decoder.gate.open()
    await running
    assert engine.broken is None
    assert forced == []


async def test_a_loop_that_came_late_is_a_figure(forced: list[float]) -> None:
    engine, metrics = TargetEngine(ScriptedDecoder()), Metrics("tiny")
    engine.start()
    running = asyncio.create_task(Host(engine, config=ServerConfig(grace_s=0.1), metrics=metrics).run())

    def figure(name: str) -> float:
        return metrics.registry.get_sample_value(name, {"model_name": "tiny"}) or 0.0

    await until(lambda: figure("specdec_event_loop_tasks") > 1)  # it has looked once
    time.sleep(0.4)  # noqa: ASYNC251 - what a large message used to do
    await until(lambda: figure("specdec_event_loop_lag_seconds") > 0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    await running


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
    """Run a process whose host never finishes draining; yield (process, (its stdin, stdout, stderr))."""
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
    """A second signal ends a draining server at once, with one line in the log."""
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
    """If the end of stdin began a drain, one SIGTERM (Kubernetes sends it to a deleted pod) does not end it at once."""
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
