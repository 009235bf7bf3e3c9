"""Imitation of vLLM's engine core in the test's process, without vLLM; requests, passes and reports are as in vLLM.

The draft trees in the core, the messages (frames) between it and this project's engine, and that engine are real. A
function of the tokens so far replaces the model. Frames are encoded to bytes and decoded, but not sent by a socket.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from zlib import crc32

from specdec.inference.request import GenerationRequest
from specdec.inference.vllm.drafts import Drafts
from specdec.inference.vllm.frames import (
    LENGTH,
    VERSION,
    FromCore,
    Gone,
    Hello,
    Passed,
    Row,
    Served,
    ToCore,
    Wanted,
    from_core,
    packed,
    to_core,
)
from specdec.inference.vllm.lending import CoreRequest, LendingEngine
from specdec.inference.vllm.mailbox import Mailbox

VOCAB_SIZE = 256
SERVED = Served("model", b"a tokenizer", [1], VOCAB_SIZE, 128, 4)
_names = itertools.count()


def choice(token_ids: Sequence[int], sampling: str) -> int:
    """Return a token that depends only on the tokens before it and on a text of the sampling parameters."""
    return crc32(bytes(token_ids) + sampling.encode()) % VOCAB_SIZE


def through_bytes(frame: FromCore) -> FromCore:
    return from_core(packed(frame)[LENGTH.size :])


class DirectMailbox(Mailbox):
    """Mailbox that hands each message to its core at once, encoded and decoded, instead of through a socket.

    `drafts` are the draft trees of the cores, in the order of their ranks.
    """

    def __init__(self, *drafts: Drafts) -> None:
        super().__init__(Path("unused"), "model")
        self.hello = Hello(VERSION, "model", SERVED)
        self._drafts = drafts

    @property
    def num_links(self) -> int:
        return len(self._drafts)

    def send(self, rank: int, frame: ToCore) -> None:
        self._drafts[rank].receive(to_core(packed(frame)[LENGTH.size :]))


class ScriptedCore:
    """Imitation of vLLM's engine core, which runs one pass after another while it has requests.

    Args:
        choose: function from the tokens so far, and a text of the sampling parameters, to the next token.
        cost: function from the numbers of requests and of tokens (with draft tokens) in a pass to its seconds.

    Attributes:
        front: this project's engine, which gets the core's messages; a test must set it, as `ClientsOfCore` does.
        rank: number of this core at `front`.
        reports: reports on all passes so far, in their order.
    """

    def __init__(
        self,
        choose: Callable[[Sequence[int], str], int] = choice,
        cost: Callable[[int, int], float] = lambda num_requests, num_rows: 0.0,
    ) -> None:
        self._choose, self._cost = choose, cost
        self._ended: float | None = None  # of the latest pass, if there was work ever since
        self.drafts = Drafts()
        self.front: LendingEngine | None = None
        self.rank = 0
        self.reports: list[Passed] = []
        self._running: dict[str, tuple[list[int], int, str]] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._passes: asyncio.Task[None] | None = None

    def arrive(self, request: GenerationRequest) -> str:
        """Add a request, announce it to the engine `front`, and start the passes; return its name in the core."""
        name = f"core-{next(_names)}"
        token_ids, self._ends[name] = list(request.prompt_token_ids), asyncio.Event()
        sampling = {key: value for key, value in asdict(request.sampling).items() if key != "noise"}
        wanted = Wanted(token_ids, request.output_start, request.max_new_tokens, request.gamma or 8, sampling)
        self.send(self.drafts.enter(name, token_ids, wanted.gamma, wanted))
        self._ended = self._ended if self._running else None
        self._running[name] = token_ids, len(token_ids) + request.max_new_tokens, repr(request.sampling)
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run())
        return name

    def send(self, frame: FromCore) -> None:
        assert self.front is not None
        self.front.receive(self.rank, through_bytes(frame))

    def cancel(self) -> None:
        """Stop running passes."""
        if self._passes is not None:
            self._passes.cancel()

    async def until_done(self, name: str) -> None:
        """Wait until the request of this name has all of its tokens."""
        await self._ends[name].wait()

    async def _run(self) -> None:
        while self._running:
            for _ in range(4):  # readers of the pass before propose meanwhile
                await asyncio.sleep(0)
            await self._pass()

    async def _pass(self) -> None:
        rooms = {name: end - len(token_ids) - 1 for name, (token_ids, end, _) in self._running.items()}
        proposals = self.drafts.proposals(rooms, may_wait=False)
        seconds = self._cost(len(rooms), len(rooms) + sum(map(len, proposals)))
        await asyncio.sleep(seconds)
        rows = [self._verified(name, proposal) for name, proposal in zip(rooms, proposals, strict=True)]
        before, self._ended = self._ended, time.monotonic()
        period_s = 0.0 if before is None else self._ended - before
        report = Passed(round(seconds * 1e6) or 100, 0, len(self._running), rows, round(period_s * 1e6))
        self.reports.append(report)
        self.send(report)
        for name, (token_ids, end, _) in list(self._running.items()):
            if len(token_ids) >= end:
                self.drafts.leave(name)
                del self._running[name]
                self.send(Gone(name))
                self._ends[name].set()

    def _verified(self, name: str, proposal: Sequence[int]) -> Row:
        token_ids, _, sampling = self._running[name]
        start = len(token_ids)
        for believed in (*proposal, None):
            token_ids.append(self._choose(token_ids, sampling))
            if token_ids[-1] != believed:
                break
        return self.drafts.passed(name, token_ids[start:], proposal, len(token_ids) - start - 1)


class ClientsOfCore(LendingEngine):
    """Engine that lets a pool of draft workers draft for a core's requests; `open` also sends the request to the core.

    So it plays the part of vLLM's client, too. Nobody reads the answers.
    """

    def __init__(self, core: ScriptedCore) -> None:
        super().__init__(DirectMailbox(core.drafts))
        self._core, core.front = core, self
        self.vocab_size = VOCAB_SIZE

    def open(self, request: GenerationRequest, *, grammar: object = None):  # type: ignore[no-untyped-def]
        """Send a request to the core; return the session by which the pool drafts for it."""
        name = self._core.arrive(request)
        return super().open(CoreRequest(request.prompt_token_ids, name=name))
