"""Engine of a pool beside `vllm serve`: vLLM's engine cores have the requests, and the pool's workers draft for them.

Does not know vLLM: all that it needs of a request and its passes comes by the mailbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from specdec.inference.commit import Opened, TokenEvent
from specdec.inference.config import ALWAYS
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import check_token_ids
from specdec.inference.errors import InvalidRequestError, NotFoundError
from specdec.inference.model.decoder import Matcher
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import GenerationRequest, check_logit_bias
from specdec.inference.vllm.frames import FrameError, FromCore, Gone, Has, Passed, Served, Wanted
from specdec.inference.vllm.mailbox import Mailbox
from specdec.inference.vllm.session import Sessions, VllmSession
from specdec.inference.vllm.translation import sampling_of

logger = logging.getLogger(__name__)

ANSWERS_ELSEWHERE = "this is a pool of draft workers; vLLM's own server answers requests, over HTTP at its port"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRequest(GenerationRequest):
    """Request that an engine core of vLLM computes, under a name that no other core uses."""

    name: str

    @classmethod
    def of(cls, name: str, wanted: Wanted) -> CoreRequest:
        """Return the request that an engine core has announced, with its present tokens.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        return cls(
            tuple(wanted.token_ids),
            sampling_of(wanted.sampling),
            wanted.max_new_tokens,
            num_committed_tokens=len(wanted.token_ids) - wanted.output_start,
            gamma=wanted.gamma,
            name=name,
        )


class LendingEngine(Sessions):
    """The `VerificationEngine` of a pool beside `vllm serve`; the pool's server (serving/host.py) watches its health.

    It decodes nothing: vLLM's engine cores announce their requests, and get draft tokens for them.

    Args:
        mailbox: mailbox that engine cores dial; what they send is kept until `lend` is called.
        drafting: when draft workers may compute, see `Drafting`.
    """

    hangs = False

    def __init__(self, mailbox: Mailbox, drafting: str = ALWAYS) -> None:
        super().__init__(mailbox, drafting)
        mailbox.receive = self.receive
        self._pool: tuple[DraftPool, Metrics] | None = None
        self._early: list[tuple[int, FromCore | None]] = []
        self._model_id = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self.max_length = self.vocab_size = self.num_slots = self.num_waiting = 0

    async def served(self) -> Served:
        """Wait until an engine core is linked; return the description of its model."""
        while (hello := self._mailbox.hello) is None or hello.served is None:
            await self._mailbox.until_linked(self._mailbox.num_links + 1)
        self._model_id, served = hello.model_id, hello.served
        self.max_length, self.vocab_size, self.num_slots = served.max_length, served.vocab_size, served.num_slots
        return served

    def lend(self, pool: DraftPool, metrics: Metrics) -> None:
        """Let the draft workers of a pool draft for the requests of engine cores, from now on.

        Messages of cores that came before are handled first. The passes are counted in `metrics`.
        """
        self._pool = pool, metrics
        for core, frame in self._early:
            self.receive(core, frame)
        self._early.clear()

    @property
    def num_running(self) -> int:
        return len(self._sessions)

    @property
    def broken(self) -> str | None:
        """Return an error message if vLLM now serves a model with another vocabulary than at the start; else None."""
        hello = self._mailbox.hello
        changed = hello is not None and hello.model_id != self._model_id
        return "vLLM's tokens are of another model by now: start the pool again" if changed else None

    @property
    def fault(self) -> str | None:
        """Return why no requests are served at the moment; None if they are."""
        return self.broken or (None if self._mailbox.num_links else "no engine core of vLLM is linked")

    async def stop(self, *, grace_s: float) -> None:
        """End the tasks of this engine at once: vLLM goes on with the requests."""
        for task in self._tasks:
            task.cancel()

    async def compiled(self, request: GenerationRequest) -> Matcher | None:
        """Return None: vLLM keeps to grammars by itself."""
        return None

    def open(self, request: GenerationRequest, *, grammar: Matcher | None = None) -> VllmSession:
        """Return the session of a request that an engine core of vLLM has announced.

        Raises:
            NotFoundError: the request is a client's; vLLM's own server answers those.
        """
        session = self._sessions.get(getattr(request, "name", ""))
        if session is None:
            raise NotFoundError(ANSWERS_ELSEWHERE)
        return session

    def receive(self, core: int, frame: FromCore | None) -> None:
        """Apply a message of an engine core; None means that the core's link has ended, and so have its sessions.

        Raises:
            FrameError: the message has a request with invalid values, or a report lacks tokens.
        """
        if self._pool is None:
            self._early.append((core, frame))
        elif frame is None:
            self._cores.pop(core, None)
            for each in list(self._sessions.values()):
                if each.core == core:
                    self._end(each.id)
        elif isinstance(frame, Has) and frame.wanted is not None and frame.name not in self._sessions:
            self._begin(core, frame.name, frame.wanted)
        elif isinstance(frame, Passed):
            self._take(core, frame)
        elif isinstance(frame, Gone):
            self._end(frame.name)

    def _begin(self, core: int, name: str, wanted: Wanted) -> None:
        try:
            request = CoreRequest.of(name, wanted)
            check_token_ids(request.prompt_token_ids, vocab_size=self.vocab_size)
            check_logit_bias(request.sampling, vocab_size=self.vocab_size)
            session = VllmSession(request)
        except (InvalidRequestError, TypeError, ValueError) as exc:
            raise FrameError(f"request {name} cannot be: {exc}") from exc
        session.id, session.core, session.drafting = name, core, self.drafting
        self._sessions[name] = session
        task = asyncio.create_task(self._help(session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, name: str) -> None:
        if (session := self._sessions.pop(name, None)) is not None:
            session.reported.set()

    async def _help(self, session: VllmSession) -> None:
        """Let the pool draft for a request until it leaves its engine core; count its passes in the metrics."""
        assert self._pool is not None
        if session.id not in self._sessions:
            return  # it was short, and has left already
        pool, metrics = self._pool
        counted = metrics.request()
        async with aclosing(pool.generate(session.request)) as events:
            async for event in events:
                counted.take(event)

    async def answer(self, session: VllmSession) -> AsyncGenerator[TokenEvent, None]:
        """Yield an `Opened` event, then the tokens of each pass as a commit, until the request leaves its core."""
        yield Opened(0)
        while True:
            while session.rows:
                row, _ = session.rows[0]
                yield session.commit(row.token_ids, (), None)
            if session.id not in self._sessions:
                return
            session.reported.clear()
            await session.reported.wait()
