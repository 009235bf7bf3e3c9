"""A decoder and a proposer that choose a fixed token for each position, and a draft worker that proposes nothing.

A test can make the steps of decoder and proposer wait, or fail.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from specdec.inference.commit import Commit
from specdec.inference.engine.contract import VerificationSession
from specdec.inference.engine.pool import DraftPool
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.speculation.verify import verify

VOCAB_SIZE = 1000
TIMEOUT_S = 60.0


def token_at(position: int) -> int:
    """Return the token that the scripted target chooses at a position; they differ for all positions below 900."""
    return 50 + position


def tokens_at(start: int, count: int) -> list[int]:
    return [token_at(position) for position in range(start, start + count)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition()` is true, trying it every millisecond; raise AssertionError after 10,000 times."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


class Gate:
    """A gate that a test closes and opens; scripted steps, which run on another thread, wait while it is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()
        self._open.set()
        self._errors: list[Exception] = []

    def close(self) -> None:
        self._reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def fail(self, error: Exception, *, times: int) -> None:
        """Make each of the next `times` steps raise `error`."""
        self._errors = [error] * times

    def wait_until_reached(self) -> None:
        """Block the calling thread, never that of the event loop, until a step has arrived at the closed gate."""
        assert self._reached.wait(TIMEOUT_S)

    def go_through(self) -> None:
        """Wait until the gate is open, then raise the next error that `fail` set, if any.

        Scripted decoders and proposers call this in every step.
        """
        self._reached.set()
        assert self._open.wait(TIMEOUT_S)
        if self._errors:
            raise self._errors.pop()


class ScriptedDecoder:
    """A `Decoder` (the target's side) that chooses fixed tokens by position, and records its steps."""

    vocab_size = VOCAB_SIZE
    prompt_chunk_tokens = 0
    keeps_grammars = False

    def __init__(self, *, num_slots: int = 1, max_length: int = 1000) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.gate = Gate()
        self.steps: list[list[Turn]] = []

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        self.steps.append(list(turns))
        self.gate.go_through()
        return [_verdict(turn) for turn in turns]


def _verdict(turn: Turn) -> Verdict:
    if not turn.chooses:
        return Verdict((), 0, 0)
    return verify(tokens_at(len(turn.token_ids), len(turn.proposal) + 1), turn.proposal)


def ids_of(extensions: Sequence[Sequence[DraftToken] | None]) -> list[list[int] | None]:
    """Return the token ids of each draft in what `Proposer.extend` returned; None for a draft it could not extend."""
    return [None if tokens is None else [token.token_id for token in tokens] for tokens in extensions]


class ScriptedProposer:
    """A `Proposer` (the draft's side) that adds in each step the token which the scripted target will choose."""

    num_slots, max_length, num_branches = 2, 40, 0

    def __init__(self) -> None:
        self.gate = Gate()
        self.steps: list[list[Draft]] = []

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        self.steps.append(list(drafts))
        self.gate.go_through()
        return [[DraftToken(token_at(len(draft.token_ids)))] for draft in drafts]


class SilentWorker:
    """A draft worker in a target's pool that takes every session it is offered, and never proposes a token.

    `sessions` has the ids of its open sessions, `most` their greatest number so far.
    """

    does_rounds, takes_hold, scope = True, False, ""

    def __init__(self, name: str, num_slots: int, pool: DraftPool) -> None:
        self.id = name
        self.num_slots = num_slots
        self._pool = pool
        self.most = 0
        self.sessions: set[str] = set()

    def open(self, session: VerificationSession) -> None:
        self.sessions.add(session.id)
        self.most = max(self.most, len(self.sessions))

    def commit(self, session: VerificationSession, commit: Commit) -> None: ...

    def close(self, session: VerificationSession) -> None:
        self.sessions.discard(session.id)

    def hold(self, number: int, *, is_on: bool) -> None: ...
