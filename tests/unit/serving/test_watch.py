"""The end of a server: its reports while it breaks or drains, and its exit even if something hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

from specdec.inference.config import ServerConfig
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import InternalError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import GenerationRequest
from specdec.inference.serving import host
from specdec.inference.serving.host import Host
from tests.support.answers import commits_of
from tests.support.scripted import ScriptedDecoder, until

QUICK = ServerConfig(grace_s=0.1)


class Diary:
    """A `Front` that records the calls of its methods with their times."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.at: list[float] = []

    def _note(self, word: str) -> None:
        self.told.append(word)
        self.at.append(time.monotonic())

    async def open(self) -> None:
        self._note("open")

    def report(self, *, ready: bool, alive: bool = True) -> None:
        self._note(f"ready={ready} alive={alive}")

    @property
    def ports(self) -> dict[str, int]:
        return {"grpc": 1}

    async def refuse_new(self) -> None:
        self._note("refuse")

    async def close(self) -> None:
        self._note("close")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that gets the times at which the process would have ended itself."""
    times: list[float] = []
    monkeypatch.setattr(host, "_give_up", lambda: times.append(time.monotonic()))
    return times


async def test_draining_is_reported_before_requests_are_refused(forced: list[float]) -> None:
    """A server that drains reports it for a time before it refuses requests.

    It was once otherwise: NOT_SERVING and refusals began at once, so balancers that had not noticed yet lost requests.
    """
    engine, diary = TargetEngine(ScriptedDecoder()), Diary()
    engine.start()
    running = asyncio.create_task(Host(engine, [diary], config=replace(QUICK, drain_delay_s=0.5)).run())
    await until(lambda: diary.told == ["open"])
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: diary.told[-1] == "ready=False alive=True")
    request = GenerationRequest((1, 2), max_new_tokens=2)
    assert [commit.position for commit in await commits_of(engine.generate(request))] == [2, 3]  # still served
    await running
    assert diary.told == ["open", "ready=False alive=True", "refuse", "close"]
    assert diary.at[2] - diary.at[1] >= 0.5
    assert forced == []


async def test_a_broken_engine_ends_the_process_with_an_error(forced: list[float]) -> None:
    """A server with a broken engine ends with an error.

    It was once otherwise: a server with a broken engine reported SERVING for ever, and was not restarted.
    """
    decoder, diary = ScriptedDecoder(), Diary()
    engine = TargetEngine(decoder)
    engine.start()
    running = asyncio.create_task(Host(engine, [diary], config=QUICK).run())
    await until(lambda: diary.told == ["open"])
    decoder.gate.fail(RuntimeError("the device is gone"), times=100)
    for _ in range(8):
        with pytest.raises(Exception, match=r"failed|row"):
            _ = await commits_of(engine.generate(GenerationRequest((1, 2))))
    async with asyncio.timeout(60):
        with pytest.raises(InternalError, match="in a row"):
            await running
    assert diary.told == ["open", "ready=False alive=False", "refuse", "close"]


async def test_a_hanging_pass_makes_the_server_unready(monkeypatch: pytest.MonkeyPatch, forced: list[float]) -> None:
    monkeypatch.setattr(host, "FORCE_AFTER_S", 0.5)
    decoder, diary = ScriptedDecoder(), Diary()
    engine = TargetEngine(decoder, EngineLimits(pass_timeout_s=0.1))
    engine.start()
    decoder.gate.close()
    try:
        running = asyncio.create_task(Host(engine, [diary], config=QUICK).run())
        session = engine.open(GenerationRequest((1, 2)))
        await until(lambda: diary.told[-1:] == ["ready=False alive=False"])
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            with pytest.raises(InternalError, match="still running"):
                await running
            await until(lambda: forced != [])  # the interpreter would wait for the pass
        engine.close(session)
    finally:
        decoder.gate.open()


async def test_a_pass_whose_sessions_have_gone_elsewhere_may_end(forced: list[float]) -> None:
    """A drained server lets its last pass end, and exits with code 0.

    It was once otherwise: a drain moved all requests while their last pass ran, and the process ended with code 1.
    """
    decoder, diary = ScriptedDecoder(), Diary()
    engine = TargetEngine(decoder)
    engine.start()
    decoder.gate.close()
    running = asyncio.create_task(Host(engine, [diary], config=QUICK).run())
    session = engine.open(GenerationRequest((1, 2)))
    await until(lambda: engine._thread.began is not None)
    engine.close(session)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: diary.told[-1:] == ["refuse"])
    await asyncio.sleep(0.1)
    decoder.gate.open()
    await running
    assert engine.broken is None
    assert forced == []


async def test_a_loop_that_came_late_is_a_figure(forced: list[float]) -> None:
    engine, metrics = TargetEngine(ScriptedDecoder()), Metrics("tiny")
    engine.start()
    running = asyncio.create_task(Host(engine, config=QUICK, metrics=metrics).run())

    def figure(name: str) -> float:
        return metrics.registry.get_sample_value(name, {"model_name": "tiny"}) or 0.0

    await until(lambda: figure("specdec_event_loop_tasks") > 1)  # it has looked once
    time.sleep(0.4)  # noqa: ASYNC251 - what a large message used to do
    await until(lambda: figure("specdec_event_loop_lag_seconds") > 0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    await running
