"""Drafting for vLLM's engine cores stops while it is slower than decoding without; it goes on later; texts are equal.

Pool, engine and draft trees are the real ones; the cores are scripted, on a virtual clock, so that figures are equal on
every machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from specdec.inference.commit import Commit, TokenEvent
from specdec.inference.config import ALWAYS, MEASURED, NEVER
from specdec.inference.engine.pool import DraftPool
from specdec.inference.request import GenerationRequest
from specdec.inference.scheduling.quiet import Pass
from specdec.inference.vllm.frames import Passed, Row
from specdec.inference.vllm.lending import LendingEngine
from specdec.inference.vllm.session import Sessions, VllmSession
from tests.support.scripted_core import DirectMailbox, ScriptedCore
from tests.support.virtual import MAX_LENGTH, VOCAB_SIZE, Clock, Outcome, PoolWorker, Scenario, novel

LENGTH = 100
PROMPT = tuple(map(novel, range(20)))
TEXT = tuple(map(novel, range(len(PROMPT), len(PROMPT) + LENGTH)))
NUM_CLIENTS = 4
"""Number of clients that each engine core has."""


def cpu(num_sessions: int, num_rows: int) -> float:
    """Return the seconds of a pass on a CPU, which rise with the number of tokens (rows) in the pass."""
    return (4.2 + 0.30 * num_rows) / 1e3


class Readings:
    """Stand-in for a pool's metrics, which records each request's tokens in `texts`, and all tokens by time."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome, self.texts = outcome, list[list[int]]()

    def request(self) -> Any:
        """Return the record of a new request; its method `take` gets the request's events."""
        self.texts.append([])
        return _Reading(self._outcome, self.texts[-1])


class _Reading:
    def __init__(self, outcome: Outcome, text: list[int]) -> None:
        self._outcome, self._text = outcome, text

    def take(self, event: TokenEvent) -> None:
        if isinstance(event, Commit):
            self._text += event.token_ids
            self._outcome.marks.append((time.monotonic(), len(event.token_ids)))


async def _client(core: ScriptedCore) -> None:
    """Send one request after another to an engine core, until this task is cancelled."""
    while True:
        await core.until_done(core.arrive(GenerationRequest(PROMPT, max_new_tokens=LENGTH)))


async def _serve(clock: Clock, scenario: Scenario, mode: str, num_cores: int) -> Outcome:
    worker: PoolWorker | None = None

    def cost(num_requests: int, num_rows: int) -> float:
        share = scenario.contention(clock.now) if worker is not None and worker.computes else 0.0
        return scenario.cost(num_requests, num_rows) * (1 + share)

    cores = [ScriptedCore(lambda token_ids, _: novel(len(token_ids)), cost) for _ in range(num_cores)]
    engine = LendingEngine(DirectMailbox(*(core.drafts for core in cores)), mode)
    engine.max_length, engine.vocab_size = MAX_LENGTH, VOCAB_SIZE
    for rank, core in enumerate(cores):
        core.front, core.rank = engine, rank
    pool = DraftPool(engine)
    worker = PoolWorker("w", pool, clock, scenario)
    outcome = Outcome(engine.drafting, workers=[worker])
    readings: Any = Readings(outcome)
    engine.lend(pool, readings)
    pool.attach(worker)
    jobs = [worker.run(), *(_client(core) for core in cores for _ in range(NUM_CLIENTS))]
    tasks = [asyncio.create_task(job) for job in jobs]
    await asyncio.sleep(scenario.seconds)
    for core in cores:
        core.cancel()
    for task in tasks:
        task.cancel()
    await engine.stop(grace_s=0.0)
    assert all(tuple(text) == TEXT[: len(text)] for text in readings.texts)
    return outcome


def outcome_of(
    mode: str, contention: Callable[[float], float], *, alpha: float, num_cores: int = 1, seconds: float = 8.0
) -> Outcome:
    """Run clients of vLLM's cores and a draft worker; return the tokens by time and the state of drafting.

    For `contention` and `alpha` see `Scenario`; `mode` is a value of --drafting.
    """
    clock = Clock()
    scenario = Scenario(cpu, lambda _: NUM_CLIENTS, contention, alpha=alpha, seconds=seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock.time)
        try:
            asyncio.set_event_loop(clock)
            return clock.run_until_complete(_serve(clock, scenario, mode, num_cores))
        finally:
            asyncio.set_event_loop(None)
            clock.close()


@pytest.mark.parametrize("num_cores", [1, 2])
def test_a_worker_that_makes_passes_slower_is_held(num_cores: int) -> None:
    """A worker whose drafts cost more than they gain is stopped, by one decision for all engine cores."""

    def run(mode: str) -> Outcome:
        return outcome_of(mode, lambda _: 1.3, alpha=0.6, num_cores=num_cores)

    plain, today, ours = run(NEVER), run(ALWAYS), run(MEASURED)
    assert plain.num_steps == 0
    assert today.num_tokens() < 0.9 * plain.num_tokens()
    assert ours.num_tokens(2.0) >= 0.97 * plain.num_tokens(2.0)
    assert ours.num_steps < 0.1 * today.num_steps


def test_a_worker_that_helps_goes_on() -> None:
    today, ours = (outcome_of(mode, lambda _: 0.0, alpha=0.85) for mode in (ALWAYS, MEASURED))
    assert ours.num_tokens() >= 0.97 * today.num_tokens()


def test_a_hold_is_lifted_when_drafting_pays_again() -> None:
    """Drafting stops while another program takes the worker's cores, and goes on afterwards."""
    plain, ours = (
        outcome_of(mode, lambda now: 1.4 if 3 < now < 7 else 0.0, alpha=0.8, seconds=12.0) for mode in (NEVER, MEASURED)
    )
    assert ours.num_tokens(4.0, 7.0) >= 0.9 * plain.num_tokens(4.0, 7.0)
    assert ours.num_tokens(9.0) >= 1.1 * plain.num_tokens(9.0)


@pytest.mark.parametrize(("gammas", "counts"), [((0, 0), False), ((0, None), True), ((4,), True)])
def test_passes_of_requests_without_drafts_decide_nothing(gammas: tuple[int | None, ...], counts: bool) -> None:
    """Passes of requests with gamma 0, which have no drafts, are not measured to decide whether drafting goes on.

    `gammas` are those of the requests in a pass; `counts` tells whether the pass is measured.

    Regression: at a target over vLLM, such passes switched drafting off for requests that want it.
    """
    front = Sessions(DirectMailbox(), MEASURED)
    sessions = [VllmSession(GenerationRequest(PROMPT, gamma=gamma)) for gamma in gammas]
    front._sessions = {session.id: session for session in sessions}
    measured: list[Pass] = []
    front.drafting.measured = lambda each, **_: measured.append(each)  # type: ignore[method-assign]
    front._take(0, Passed(9, 0, len(sessions), [Row(name, 20, 1) for name in front._sessions], period_us=10))
    assert bool(measured) is counts
