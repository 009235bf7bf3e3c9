"""Unread log-probabilities of prompts have a budget that all calls of a service share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specdec.inference.commit import TokenLogprobs
from specdec.inference.errors import CapacityError
from specdec.inference.workers.completing import generation
from specdec.inference.workers.completing.generation import ScoreWriter
from tests.support.scripted import until

SCORES = (TokenLogprobs((1, 2, 3), (-1.0, -2.0, -3.0)),) * 4


class Peer:
    """A peer that takes messages when the test lets it."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = asyncio.Event()
        if reads:
            self._reads.set()
        self.messages: list[str] = []

    async def write(self, message: str) -> None:
        self.messages.append(message)
        await self._reads.wait()


def writing(writer: ScoreWriter, peer: Any, scores: tuple[TokenLogprobs, ...] = SCORES) -> asyncio.Task[None]:
    return asyncio.create_task(writer.write(peer, str, 7, scores))


async def test_a_call_beyond_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is refused if unread answers with scores would take too much memory.

    It was once otherwise: hundreds of unread answers of 16 MB could stay in memory: such calls hold no slot.
    """
    monkeypatch.setattr(generation, "MAX_UNREAD_SCORES", 30)
    writer, deaf, good = ScoreWriter(), Peer(reads=False), Peer(reads=True)
    unread = [writing(writer, deaf), writing(writer, deaf)]
    await until(lambda: len(deaf.messages) == 2)
    with pytest.raises(CapacityError, match=r"24 of this server wait to be read \(limit 30\)"):
        await writing(writer, good)
    await writing(writer, good, ())  # a call that wants none is not concerned
    unread[0].cancel()
    await asyncio.wait(unread[:1])
    await writing(writer, good)
    assert good.messages == ["7", "7"]
    unread[1].cancel()


async def test_a_call_alone_has_room_for_any_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_UNREAD_SCORES", 5)
    peer = Peer(reads=True)
    await writing(ScoreWriter(), peer)
    assert peer.messages == ["7"]
