"""Simulation of a target and its draft workers on a virtual clock: the engine and its scheduling are the real ones.

A pass takes the seconds that a scenario's cost says, and more while a draft worker computes if the two share a core. No
thread runs, and nothing waits in real time, so a scenario gives the same figures on every machine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from specdec.inference.commit import Commit
from specdec.inference.config import ALWAYS
from specdec.inference.engine.contract import VerificationSession
from specdec.inference.engine.drafting import Drafting
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.speculation.grammar import fit
from specdec.inference.speculation.tree import Branch
from specdec.inference.speculation.verify import verify
from specdec.inference.tokens import common_length

T = TypeVar("T")
VOCAB_SIZE = 5000
MAX_LENGTH = 1000
WRONG = 7
"""Token id that no simulated text contains; as a draft token it is always rejected."""
WINDOW = 8
Text = Callable[[int], int]
"""Function from a position to the token id that the simulated target chooses there."""


class _Selector(selectors.DefaultSelector):
    """Selector that advances a virtual clock by the time that a real selector would wait for events."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not (events := super().select(0)):
            assert timeout is not None, "all tasks wait for each other"
            self._clock.now += max(0.0, timeout)
        return events


class Clock(asyncio.SelectorEventLoop):
    """Event loop with a virtual clock, which advances only when all tasks wait: to the time of the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now


class _Thread:
    """Model thread of an engine on the virtual clock.

    A function that it runs advances the clock; the caller gets the result once other tasks have had that time, too.
    """

    began = None

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def run(self, function: Callable[[], T]) -> T:
        started = self._clock.now
        result = function()
        ended, self._clock.now = self._clock.now, started
        await asyncio.sleep(ended - started)
        return result

    def close(self) -> None: ...


def novel(position: int) -> int:
    """Return the token at a position of a text in which no token comes twice."""
    return 50 + position


def changing(position: int) -> int:
    """Return the token at a position of a text that alternates: 40 tokens are all new, 40 repeat the same ten."""
    return 2000 + position % 10 if position // 40 % 2 else 50 + position


def drawn(*key: object) -> float:
    """Return a random number in [0, 1) that is always the same for equal keys."""
    return random.Random(repr(key)).random()


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated: the load by clients, and the speeds of the target, the draft workers and the network.

    Times are virtual seconds; "the time" is that since the start of the run.

    Attributes:
        cost: function from the number of requests and the number of tokens in a pass to its seconds.
        streams: function from the time to the number of clients, each of which sends one request after another.
        contention: function from the time to the share (0.5: by half) by which a pass takes longer while a worker
            computes.
        alpha: probability that a draft token is right, if all before it are.
        step_s, link_s: seconds of one step of a draft model, and of a message to a worker or from it.
        stop_s: seconds for which a worker goes on computing after the target asked it to stop.
        num_workers: number of draft workers; must be 1 if `is_private`.
        length: fewest and most tokens of an answer.
        text: the target's text.
        predicted: text that each request sends as a prediction of its answer; None for no prediction.
        gamma: most draft tokens of a pass, as the requests set it; None leaves it to the target.
        slower: function from the time to a factor on the seconds of all passes and draft steps.
        shares: whether the target knows that the workers share its cores.
        first_s: extra seconds of the first pass with draft tokens, and of the first pass without them.
        noise: relative standard deviation of the seconds of a pass.
        window: most draft tokens that a worker proposes past the committed tokens.
        seconds: length of the run.
        is_private: True if the draft worker is in the clients' process; False if workers serve the requests of all
            clients, as a pool.
    """

    cost: Callable[[int, int], float]
    streams: Callable[[float], int]
    contention: Callable[[float], float] = lambda _: 0.0
    alpha: float = 0.6
    step_s: float = 0.0012
    link_s: float = 0.0003
    stop_s: float = 0.0
    num_workers: int = 1
    length: tuple[int, int] = (60, 240)
    text: Text = novel
    predicted: Text | None = None
    gamma: int | None = WINDOW
    slower: Callable[[float], float] = lambda _: 1.0
    shares: bool = False
    first_s: float = 0.0
    noise: float = 0.08
    is_private: bool = False
    window: int = WINDOW
    seconds: float = 12.0


class _Decoder:
    """Simulated target: its passes advance the virtual clock, and its token depends only on the position."""

    vocab_size, max_length, prompt_chunk_tokens, keeps_grammars, num_slots = VOCAB_SIZE, MAX_LENGTH, 0, False, 64

    def __init__(self, clock: Clock, scenario: Scenario, workers: Sequence[PoolWorker]) -> None:
        self._clock, self._scenario, self._workers = clock, scenario, workers
        self._rng, self._seen = random.Random(1), set[bool]()

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        scenario, fitted = self._scenario, [fit(turn) for turn in turns]
        num_rows = sum(each.turn.num_unread + len(each.turn.proposal) for each in fitted)
        seconds = scenario.cost(len(turns), num_rows) * self._rng.lognormvariate(0.0, scenario.noise)
        seconds *= scenario.slower(self._clock.now)
        if any(worker.computes for worker in self._workers):
            seconds *= 1 + scenario.contention(self._clock.now)
        has_drafts = num_rows > len(turns)
        if has_drafts not in self._seen:
            seconds += scenario.first_s
            self._seen.add(has_drafts)
        self._clock.now += seconds
        return [each.counted(self._verdict(each.turn)) for each in fitted]

    def _verdict(self, turn: Turn) -> Verdict:
        if not turn.chooses:
            return Verdict((), 0, 0)
        start = len(turn.token_ids)
        return verify([self._scenario.text(start + i) for i in range(len(turn.proposal) + 1)], turn.proposal)


@dataclass(slots=True)
class _Chain:
    """Draft tokens that a worker has proposed for a session, after the `num_known` tokens that it knows are final.

    Attributes:
        request: name of the session's request.
        in_rounds: True if the worker proposes a whole window and then waits for the target; False if it drafts on.
        num_unread: tokens that the draft model must read before it can add a draft token.
        tokens: the draft tokens past the final ones.
        last_node, num_nodes: number of the last draft token sent, as the target counts them, and how many were sent.
        waits: True while the worker waits until the target has verified the draft tokens; only if `in_rounds`.
    """

    request: str
    num_known: int
    in_rounds: bool
    num_unread: int
    tokens: list[int] = field(default_factory=list)
    last_node: int | None = None
    num_nodes: int = 0
    waits: bool = False

    def commit(self, position: int, token_ids: Sequence[int]) -> None:
        new = token_ids[self.num_known - position :]
        agrees = self.tokens[: len(new)] == list(new)
        self.num_known += len(new)
        if agrees and not self.in_rounds:
            self.tokens = self.tokens[len(new) :]
        else:
            self.num_unread += len(new) - common_length(self.tokens, new)
            self.tokens, self.last_node, self.waits = [], None, False

    def send(self, token_ids: list[int]) -> Branch:
        branch = Branch(self.last_node, self.num_known, token_ids)
        self.num_nodes += len(token_ids)
        self.last_node = self.num_nodes - 1
        return branch


class PoolWorker:
    """Simulated draft worker, which drafts for the requests of all clients, as part of the target's pool.

    Its draft steps and its messages take virtual time. So does a request of the target to stop drafting.
    """

    does_rounds, takes_hold, scope, num_slots = True, True, "", 64

    def __init__(self, name: str, pool: DraftPool, clock: Clock, scenario: Scenario) -> None:
        self.id, self._pool, self._clock, self._scenario = name, pool, clock, scenario
        self._chains: dict[str, _Chain] = {}
        self.computes, self.num_steps, self._is_held, self._number = False, 0, False, 0
        self._wake = asyncio.Event()

    def _later(self, action: Callable[..., object], *arguments: object) -> None:
        self._clock.call_later(self._scenario.link_s, action, *arguments)

    def open(self, session: VerificationSession) -> None:
        name, in_rounds = session.request.cache_salt, not session.runs_ahead
        self._later(self.begin, session.help_id, name, len(session.token_ids), in_rounds)

    def begin(self, name: str, request: str, num_tokens: int, in_rounds: bool = False) -> None:
        self._chains[name] = _Chain(request, num_tokens, in_rounds, num_tokens)
        self._wake.set()

    def close(self, session: VerificationSession) -> None:
        self._later(self.end, session.help_id)

    def end(self, name: str) -> None:
        self._chains.pop(name, None)

    def commit(self, session: VerificationSession, commit: Commit) -> None:
        self._later(self.take, session.help_id, commit)

    def take(self, name: str, commit: Commit) -> None:
        if (chain := self._chains.get(name)) is not None:
            chain.commit(commit.position, commit.token_ids)
            self._wake.set()

    def hold(self, number: int, *, is_on: bool) -> None:
        self._later(self._hold, number, is_on)

    def _hold(self, number: int, is_on: bool) -> None:
        self._number, self._is_held = number, is_on
        self._wake.set()

    async def run(self) -> None:
        """Draft for all sessions, step by step, until this task is cancelled."""
        while True:
            if self._is_held:
                number = self._number
                await asyncio.sleep(self._scenario.stop_s)
                self.computes = False
                self._later(self._pool.held, self, number)
                while self._is_held and self._number == number:
                    await self._news()
            elif growing := {name: each for name, each in self._chains.items() if self._grows(each)}:
                await self._step(growing)
            else:
                self.computes = False
                await self._news()

    async def _news(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    def _grows(self, chain: _Chain) -> bool:
        length = chain.num_known + len(chain.tokens)
        return not chain.waits and len(chain.tokens) < self._scenario.window and length < MAX_LENGTH

    async def _step(self, growing: dict[str, _Chain]) -> None:
        self.computes, self.num_steps = True, self.num_steps + 1
        num_unread = sum(each.num_unread for each in growing.values())
        for each in growing.values():
            each.num_unread = 0
        step_s = self._scenario.step_s * self._scenario.slower(self._clock.now)
        await asyncio.sleep(step_s * (1 + 0.1 * len(growing) + 0.05 * num_unread))
        for name, chain in growing.items():
            if self._chains.get(name) is chain and self._grows(chain) and not self._is_held:
                self._extend(name, chain)

    def _extend(self, name: str, chain: _Chain) -> None:
        place = chain.num_known + len(chain.tokens)
        is_right = WRONG not in chain.tokens and drawn(chain.request, place) < self._scenario.alpha
        chain.tokens.append(self._scenario.text(place) if is_right else WRONG)
        if not chain.in_rounds:
            self._later(self._pool.propose, self, name, [chain.send(chain.tokens[-1:])])
        elif len(chain.tokens) == self._scenario.window:
            chain.waits = True
            self._later(self._pool.propose, self, name, [chain.send(list(chain.tokens))])


class Edge(PoolWorker):
    """Simulated draft worker in its clients' process; it learns of final tokens from their answers."""

    scope = "edge 1/"

    def open(self, session: VerificationSession) -> None: ...

    def commit(self, session: VerificationSession, commit: Commit) -> None: ...

    def close(self, session: VerificationSession) -> None:
        self._later(self.end, session.request.draft_session.removeprefix(self.scope))


@dataclass
class Outcome:
    """Result of a simulated run.

    Attributes:
        drafting: the on-off switch of drafting of the target's engine.
        marks: virtual time and number of tokens of each group of final tokens that a client got, in order.
        workers: the draft workers; none if they were not simulated.
    """

    drafting: Drafting
    marks: list[tuple[float, int]] = field(default_factory=list)
    workers: list[PoolWorker] = field(default_factory=list)

    def num_tokens(self, start: float = 0.0, end: float = float("inf")) -> int:
        return sum(number for at, number in self.marks if start <= at < end)

    @property
    def num_steps(self) -> int:
        return sum(worker.num_steps for worker in self.workers)


class _Town:
    """One simulated run: a scenario with its target, draft workers and clients."""

    def __init__(self, clock: Clock, scenario: Scenario, mode: str | None, seed: int) -> None:
        self._clock, self._scenario, self._seed = clock, scenario, seed
        workers: list[PoolWorker] = []
        decoder = _Decoder(clock, scenario, workers)
        self.engine = TargetEngine(decoder, EngineLimits(max_waiting=256, drafting=mode or ALWAYS))
        self.engine._thread = _Thread(clock)  # type: ignore[assignment]
        self._pool = DraftPool(self.engine)
        self.outcome = Outcome(self.engine.drafting, workers=workers)
        kind = Edge if scenario.is_private else PoolWorker
        if mode is not None:
            workers += [kind(f"w{number}", self._pool, clock, scenario) for number in range(scenario.num_workers)]
        self._edge = workers[0] if workers and scenario.is_private else None

    async def run(self, seconds: float) -> Outcome:
        self.engine.start()
        if self._scenario.shares:
            self.engine.drafting.begin_off()
        for worker in self.outcome.workers:
            self._pool.attach(worker)
        most = max(self._scenario.streams(seconds * i / 100) for i in range(100))
        jobs = [*(self._client(number) for number in range(most)), *(each.run() for each in self.outcome.workers)]
        tasks = [asyncio.create_task(job) for job in jobs]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result
        await self.engine.stop()
        return self.outcome

    async def _client(self, number: int) -> None:
        names = itertools.count()
        while True:
            if number >= self._scenario.streams(self._clock.now):
                await asyncio.sleep(0.25)
            else:
                await self._ask(f"{number}-{next(names)}")

    async def _ask(self, name: str) -> None:
        scenario, rng = self._scenario, random.Random(f"{self._seed} {name}")
        length = rng.randrange(8, 40)
        prompt, num_tokens = tuple(map(scenario.text, range(length))), rng.randint(*scenario.length)
        predicted = tuple(map(scenario.predicted, range(length, length + num_tokens))) if scenario.predicted else ()
        request = GenerationRequest(prompt, max_new_tokens=num_tokens, gamma=scenario.gamma, prediction=predicted)
        request = replace(request, cache_salt=name)
        if self._edge is not None:
            request = replace(request, draft_session=f"{self._edge.scope}{name}", schedule=Schedule.ASYNC)
            self._edge.begin(name, name, length)
        if scenario.is_private:
            await asyncio.sleep(scenario.link_s)
        async for event in self._pool.generate(request):
            if isinstance(event, Commit):
                assert event.token_ids == tuple(map(scenario.text, range(length, length + len(event.token_ids))))
                length += len(event.token_ids)
                self.outcome.marks.append((self._clock.now, len(event.token_ids)))
                if self._edge is not None:
                    self._edge._later(self._edge.take, name, event)
        if self._edge is not None:
            self._edge.end(name)


def outcome_of(scenario: Scenario, mode: str | None, *, seed: int = 0) -> Outcome:
    """Simulate a scenario in virtual time; return its outcome.

    `mode` is a value of the flag `--drafting`; None simulates a target without draft workers.
    """
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock.time)
        try:
            asyncio.set_event_loop(clock)
            return clock.run_until_complete(_Town(clock, scenario, mode, seed).run(scenario.seconds))
        finally:
            asyncio.set_event_loop(None)
            clock.close()
