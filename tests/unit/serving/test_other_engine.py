"""A target's pool, services and host work over another engine, with passes on a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import queue
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial

from specdec.inference.caller import request_id
from specdec.inference.commit import Commit, FinishReason, Opened, TokenEvent
from specdec.inference.config import ConnectionConfig, ObserveConfig, ServerConfig
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.errors import InvalidRequestError, UnavailableError
from specdec.inference.model.decoder import Matcher
from specdec.inference.observe.metrics import Metrics
from specdec.inference.observe.timeline import Timeline
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.serving.assembly import RunningTarget, running
from specdec.inference.serving.fronts import Ports
from specdec.inference.serving.observers import Observers
from specdec.inference.serving.processes import free_port
from specdec.inference.serving.target import host_of
from specdec.inference.speculation.tree import Branch, DraftTree
from specdec.inference.speculation.verify import verify
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completion import CompletionRequest
from specdec.inference.workers.drafting.pool_worker import PoolWorker
from specdec.inference.workers.drafting.stream import Offer
from tests.support.models import tiny_tokenizer
from tests.support.scripted import VOCAB_SIZE, ScriptedProposer, tokens_at, until

GAMMA = 4


class ThreadedSession:
    """Session of a `ThreadedEngine`."""

    runs_ahead, idle_s, num_cached_tokens = True, 0.0, 0

    def __init__(self, number: int, request: GenerationRequest) -> None:
        self.id = f"t{number}"
        self.request_id = request_id()
        self.request = request
        self.token_ids = list(request.prompt_token_ids)
        self.tree = DraftTree(self.token_ids)
        self.num_helps = 0
        self.events: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()

    @property
    def help_id(self) -> str:
        return f"{self.id}.{self.num_helps}"

    def fail(self, error: Exception) -> None:
        self.events.put_nowait(error)


class ThreadedEngine:
    """Engine with a thread that verifies one session at a time and passes the result to the event loop.

    Its target chooses `token_at(position)`, so a `ScriptedProposer` is right about every token.
    """

    max_length, vocab_size, seed_invariant, num_slots, pass_us = 64, VOCAB_SIZE, True, 4, 1000
    schedule = Schedule.ASYNC
    fault = broken = None
    hangs = False

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self._numbers = itertools.count(1)
        self._sessions: dict[str, ThreadedSession] = {}
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.num_accepted = 0

    @property
    def num_running(self) -> int:
        return len(self._sessions)

    num_waiting = 0

    async def stop(self, *, grace_s: float) -> None:
        for session in list(self._sessions.values()):
            session.fail(UnavailableError("the engine stops"))
            self.close(session)
        self._work.put(None)
        self._thread.join()

    async def compiled(self, request: GenerationRequest) -> Matcher | None:
        if request.grammar is not None:
            raise InvalidRequestError("grammar: not here", field="grammar")
        return None

    def open(self, request: GenerationRequest, *, grammar: Matcher | None = None) -> ThreadedSession:
        session = ThreadedSession(next(self._numbers), request)
        self._sessions[session.id] = session
        session.events.put_nowait(Opened())
        self._put(session)
        return session

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        async with aclosing(self.answer(self.open(request))) as events:
            async for event in events:
                yield event

    async def answer(self, session: ThreadedSession) -> AsyncGenerator[TokenEvent, None]:
        try:
            while True:
                event = await session.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Commit) and event.finish_reason is not None:
                    return
        finally:
            self.close(session)

    def close(self, session: ThreadedSession) -> None:
        self._sessions.pop(session.id, None)

    def propose(self, session: ThreadedSession, branches: Sequence[Branch]) -> None:
        for branch in branches:
            session.tree.grow(branch)

    def begin_help(self, session: ThreadedSession, schedule: Schedule) -> None:
        self.end_help(session)  # rounds are not waited for: drafts that come later are of no use

    def end_help(self, session: ThreadedSession) -> None:
        session.num_helps += 1
        session.tree = DraftTree(session.token_ids)

    def _put(self, session: ThreadedSession) -> None:
        room = session.request.max_new_tokens - len(session.token_ids) + len(session.request.prompt_token_ids) - 1
        self._work.put(partial(self._pass, session, len(session.token_ids), session.tree.path(min(GAMMA, room))))

    def _pass(self, session: ThreadedSession, position: int, proposal: list[int]) -> None:
        """Verify one proposal, on the engine's thread."""
        verdict = verify(tokens_at(position, len(proposal) + 1), proposal)
        threading.Event().wait(0.002)  # a pass, in which draft tokens can arrive
        commit = Commit(position, verdict.token_ids, verdict.num_draft_tokens, verdict.num_accepted_tokens)
        self._loop.call_soon_threadsafe(self._deliver, session, commit)

    def _deliver(self, session: ThreadedSession, commit: Commit) -> None:
        if session.id not in self._sessions:
            return
        session.token_ids.extend(commit.token_ids)
        session.tree.commit(commit.token_ids)
        self.num_accepted += commit.num_accepted_tokens
        end = len(session.request.prompt_token_ids) + session.request.max_new_tokens
        is_last = len(session.token_ids) == end
        reason = FinishReason.LENGTH if is_last else None
        session.events.put_nowait(Commit(*_head(commit), finish_reason=reason))
        if not is_last:
            self._put(session)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _head(commit: Commit) -> tuple[int, tuple[int, ...], int, int]:
    return commit.position, commit.token_ids, commit.num_draft_tokens, commit.num_accepted_tokens


@asynccontextmanager
async def target(engine: ThreadedEngine) -> AsyncGenerator[int, None]:
    """Serve the engine as a target's server serves its own; yield the port."""
    port, observe = free_port(), ObserveConfig("target")
    ports = Ports(ServerConfig(port=port, grace_s=0.0), observe)
    held = RunningTarget(engine, Tokenizer(tiny_tokenizer(), frozenset()))
    host = host_of(held, "threaded", "threaded-1", "target", ports, Observers(observe, None, None))
    end = asyncio.Event()
    serving = asyncio.create_task(host.run(until=end.wait()))
    try:
        yield port
    finally:
        end.set()
        await serving


async def completed(port: int, length: int) -> list[int]:
    """Return a client's tokens of a request with a prompt of `length` tokens."""
    link = ConnectionConfig("127.0.0.1", port, 60.0)
    request = CompletionRequest(tuple(range(1, length + 1)), max_new_tokens=30, seed=1, ignore_eos=True)
    async with connected(link) as fleet, aclosing(FailoverCompleter(fleet, link).complete(request)) as events:
        return [token_id async for event in events if isinstance(event, Commit) for token_id in event.token_ids]


async def test_a_worker_of_the_pool_helps_an_engine_with_its_own_thread() -> None:
    engine = ThreadedEngine()
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(target(engine))
        assert await completed(port, 5) == tokens_at(5, 30)
        assert engine.num_accepted == 0
        drafting = await stack.enter_async_context(running(DraftEngine(ScriptedProposer())))
        words = Vocabulary(Tokenizer(tiny_tokenizer(), frozenset()).fingerprint, VOCAB_SIZE)
        worker = PoolWorker(drafting, [f"127.0.0.1:{port}"], Offer(words, GAMMA, 2), Metrics("draft"))
        stack.push_async_callback(worker.stop, grace_s=0.0)
        await until(lambda: worker.fault is None)
        answers = await asyncio.gather(*(completed(port, length) for length in (3, 4, 5)))
        assert answers == [tokens_at(length, 30) for length in (3, 4, 5)]
        assert engine.num_accepted > 0


def test_the_port_for_metrics_needs_no_fastapi() -> None:
    """The port for metrics works without FastAPI.

    It was once otherwise: beside vLLM's older FastAPI, a target with --metrics_port loaded its model, and then failed.
    """
    code = (
        "import sys; sys.modules['fastapi'] = None; from specdec.inference.gateway.door.middleware import HttpGate; "
        "from specdec.inference.gateway.door.port import Probes, SidePort; import specdec.inference.serving.target"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
