"""An answer with lost messages, or with more than the request asked for, is an error."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.server import Server
from specdec.inference.commit import Delta, Finished, FinishReason, Started, TextEvent, Timings
from specdec.inference.errors import UnavailableError
from specdec.inference.workers.calls.status import to_status
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import CompletionRequest
from tests.support.completers import CARD

NOTHING = Timings()
ANSWER: list[TextEvent] = [
    Started(3, 1),
    Delta(3, (7, 8), text="ab"),
    Delta(5, (9,), text="c"),
    Delta(6, (10,), finish_reason=FinishReason.LENGTH, text="d"),
    Finished(FinishReason.LENGTH),
]


class Says:
    """Completer that yields exactly these events."""

    def __init__(self, events: list[TextEvent]) -> None:
        self._events = events

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        for event in self._events:
            yield event


@asynccontextmanager
async def reading(events: list[TextEvent]) -> AsyncGenerator[RemoteCompleter, None]:
    server = Server("127.0.0.1:0", [GenerationServicer(Says(events), CARD)], status_of=to_status)
    await server.open()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield RemoteCompleter(channel, "behind:1", deadline_s=10.0)
    await server.close()


async def test_a_whole_answer_passes() -> None:
    async with reading(ANSWER) as completer:
        assert [event async for event in completer.complete(CompletionRequest("x"))] == ANSWER


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (3,), (4,), (1, 2), (2, 3), (1, 2, 3), (3, 4), (1, 2, 3, 4)])
async def test_no_part_of_an_answer_passes_for_the_whole(lost: tuple[int, ...]) -> None:
    """The story: a link lost 3 s of messages, and the client had 1380 of 1900 tokens and code OK."""
    left = [event for i, event in enumerate(ANSWER) if i not in lost]
    async with reading(left) as completer:
        with pytest.raises(UnavailableError, match="lost on the way"):
            _ = [event async for event in completer.complete(CompletionRequest("x"))]


async def test_an_answer_without_tokens_needs_none() -> None:
    answer: list[TextEvent] = [ANSWER[0], ANSWER[-1]]
    async with reading(answer) as completer:
        request = CompletionRequest("x", max_new_tokens=0, echo=True)
        assert [event async for event in completer.complete(request)] == answer


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "begins twice"), (1, "position 3 came where 7"), (3, "position 6 came where 7"), (4, "after its end")],
)
async def test_nothing_comes_twice(number: int, words: str) -> None:
    async with reading([*ANSWER[: max(4, number + 1)], ANSWER[number]]) as completer:
        with pytest.raises(UnavailableError, match=words):
            _ = [event async for event in completer.complete(CompletionRequest("x"))]


async def test_tokens_without_a_position_are_refused() -> None:
    async with reading([ANSWER[0], Delta(-1, (7,), text="a"), *ANSWER[2:]]) as completer:
        with pytest.raises(UnavailableError, match="position -1 came where 3 is next"):
            _ = [event async for event in completer.complete(CompletionRequest("x"))]


async def test_nothing_follows_the_last_piece() -> None:
    surplus = Delta(7, (11,), finish_reason=FinishReason.LENGTH, text="e")
    async with reading([*ANSWER[:4], surplus, ANSWER[-1]]) as completer:
        with pytest.raises(UnavailableError, match="5 tokens came, the limit is 4"):
            _ = [event async for event in completer.complete(CompletionRequest("x"))]
