"""The engine of a draft model: chains of many sessions, extended together, one step at a time.

A session has a window: how many tokens past the committed ones its chain should reach. The engine extends every chain
that is shorter, until the proposer has nothing more to say. Synchronous rounds set the window, await the chain, and
close the window; run-ahead leaves it open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from inference.engine.engine import Engine
from inference.types import Draft, Proposer, SamplingParams

_Extension = list[int] | None


class DraftSession:
    """One sequence's chain. Owned by the engine's loop."""

    def __init__(self, token_ids: Sequence[int], sampling: SamplingParams, *, output_start: int | None = None) -> None:
        self.slot: int | None = None
        self.committed = list(token_ids)
        self.output_start = len(token_ids) if output_start is None else output_start
        self.chain: list[int] = []
        self.sampling = sampling
        self.window = 0
        self.num_sent = 0  # how much of the chain the target was told of
        self.exhausted = False  # the proposer has nothing more for this chain
        self.epoch = 0  # changes whenever the chain loses tokens, so that a step under way is dropped
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def enter(self, slot: int) -> None:
        self.slot = slot
        self._changed.set()

    @property
    def wants_more(self) -> bool:
        return len(self.chain) < self.window and not self.exhausted

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append what a step gave; nothing means that there is nothing more."""
        self.chain.extend(token_ids[: self.window - len(self.chain)])
        self.exhausted = not token_ids
        self._changed.set()

    def commit(self, token_ids: Sequence[int]) -> None:
        """Move committed tokens over; the chain keeps what follows them, if it agrees with all of them."""
        agrees = self.chain[: len(token_ids)] == list(token_ids)
        self.committed.extend(token_ids)
        self.chain = self.chain[len(token_ids) :] if agrees else []
        self.num_sent = max(0, self.num_sent - len(token_ids)) if agrees else 0
        self.epoch += not agrees
        self.exhausted = False

    async def drafted(self) -> list[int]:
        """The chain, once it has reached the window or can grow no further.

        Raises:
            Exception: the engine failed this session.
        """
        await self._until(lambda: not self.wants_more)
        return self.chain

    async def unsent(self) -> list[int]:
        """What the target was not told of yet, once there is something.

        Raises:
            Exception: the engine failed this session.
        """
        await self._until(lambda: len(self.chain) > self.num_sent)
        return self.chain[self.num_sent :]

    async def admitted(self) -> None:
        """Wait for a slot.

        Raises:
            Exception: the engine failed this session.
        """
        await self._until(lambda: self.slot is not None)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self._error is None and not condition():
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error


class DraftEngine(Engine[DraftSession, tuple[int, Draft], _Extension]):
    """Batches the chains of many sessions over one proposer."""

    def __init__(self, proposer: Proposer, *, max_waiting: int = 64) -> None:
        super().__init__(num_slots=proposer.num_slots, max_waiting=max_waiting)
        self._proposer = proposer
        self.step_s = 0.0  # recent mean of one step; 0 while unknown

    def open(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, output_start: int | None = None
    ) -> DraftSession:
        """Queue a sequence for a slot of the draft model; its output begins behind it, or at `output_start`.

        Raises:
            CapacityError: slots and queue are full.
            UnavailableError: the engine is stopping.
        """
        session = DraftSession(token_ids, sampling, output_start=output_start)
        self._enter(session)
        return session

    async def propose(self, session: DraftSession, num_tokens: int) -> tuple[int, ...]:
        """One synchronous round: draft up to `num_tokens` past the committed ones, then stop."""
        session.window = num_tokens
        self.wake()
        chain = await session.drafted()
        session.window = 0
        return tuple(chain)

    def run_ahead(self, session: DraftSession, window: int) -> None:
        """Keep the chain `window` tokens long, whatever is committed."""
        session.window = window
        self.wake()

    def commit(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        """Tell a session what is final; its chain goes on from there."""
        session.commit(token_ids)
        self.wake()

    def _schedule(self, sessions: Sequence[DraftSession]) -> list[tuple[DraftSession, tuple[int, Draft]]]:
        return [(session, (session.epoch, _draft(session))) for session in sessions if self._can_grow(session)]

    def _can_grow(self, session: DraftSession) -> bool:
        if session.wants_more and len(session.committed) + len(session.chain) > self._proposer.max_length:
            session.extend(())  # out of room: the target goes on alone
        return session.wants_more

    def _compute(self, work: list[tuple[int, Draft]]) -> list[_Extension]:
        started = time.monotonic()
        extensions = self._proposer.extend([draft for _, draft in work])
        elapsed_s = time.monotonic() - started
        if None not in extensions:  # reading a prompt is not a step of drafting
            self.step_s += 0.1 * (elapsed_s - self.step_s) if self.step_s else elapsed_s
        return extensions

    def _deliver(self, session: DraftSession, work: tuple[int, Draft], result: _Extension) -> None:
        epoch, _ = work
        if session.epoch == epoch and result is not None:
            session.extend(result)


def _draft(session: DraftSession) -> Draft:
    if session.slot is None:
        raise RuntimeError("a draft session without a slot was scheduled")
    token_ids = [*session.committed, *session.chain]
    num_wanted = session.window - len(session.chain)
    return Draft(session.slot, token_ids, session.sampling, num_wanted, session.output_start)
