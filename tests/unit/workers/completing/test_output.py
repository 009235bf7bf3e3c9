"""An answer with lost messages, or with more than the request asked for, is an error."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from specdec.grpc_comm.channel import open_channel
from specdec.inference.commit import Delta, Finished, FinishReason, Started, TextEvent, Timings
from specdec.inference.errors import UnavailableError
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import CompletionRequest
from tests.support.completers import CARD
from tests.support.ports import listening

NOTHING = Timings()
ANSWER: list[TextEvent] = [
    Started(3, 1),
    Delta(3, (7, 8), text="ab"),
    Delta(5, (9,), text="c"),
    Delta(6, (10,), finish_reason=FinishReason.LENGTH, text="d"),
    Finished(FinishReason.LENGTH),
]


class Says:
    """Completer that yields the given events and then ends."""

    def __init__(self, events: list[TextEvent]) -> None:
        self._events = events

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        for event in self._events:
            yield event


@asynccontextmanager
async def reading(events: list[TextEvent]) -> AsyncGenerator[RemoteCompleter, None]:
    async with (
        listening(GenerationServicer(Says(events), CARD)) as server,
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield RemoteCompleter(channel, "behind:1", deadline_s=10.0)


async def test_a_whole_answer_passes() -> None:
    async with reading(ANSWER) as completer:
        assert [event async for event in completer.complete(CompletionRequest("x"))] == ANSWER


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (3,), (4,), (1, 2), (2, 3), (1, 2, 3), (3, 4), (1, 2, 3, 4)])
async def test_no_part_of_an_answer_passes_for_the_whole(lost: tuple[int, ...]) -> None:
    """An answer that lacks a part of its messages is an error, and does not pass for a whole one.

    Regression: a connection lost 3 s of messages, and the client had 1380 of 1900 tokens and code OK.
    """
    left = [event for i, event in enumerate(ANSWER) if i not in lost]
    async with reading(left) as completer:
        with pytest.raises(UnavailableError, match="lost on the way"):
            _ = [event async for event in completer.complete(CompletionRequest("x"))]


async def test_an_answer_without_tokens_needs_none() -> None:
    answer: list[TextEvent] = [ANSWER[0], ANSWER[-1]]
    async with reading(answer) as completer:
        request = CompletionRequest("x", max_new_tokens=0, echo=True)
        assert [event async for event in completer.complete(request)] == answer


SURPLUS = Delta(7, (11,), finish_reason=FinishReason.LENGTH, text="e")


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([*ANSWER[:4], ANSWER[0]], "begins twice"),
        ([*ANSWER[:4], ANSWER[1]], "position 3 came where 7"),
        ([*ANSWER[:4], ANSWER[3]], "position 6 came where 7"),
        ([*ANSWER[:5], ANSWER[4]], "after its end"),
        ([ANSWER[0], Delta(-1, (7,), text="a"), *ANSWER[2:]], "position -1 came where 3 is next"),
        ([*ANSWER[:4], SURPLUS, ANSWER[-1]], "5 tokens came, the limit is 4"),
    ],
)
async def test_no_event_comes_twice_or_out_of_order(events: list[TextEvent], words: str) -> None:
    async with reading(events) as completer:
        with pytest.raises(UnavailableError, match=words):
            _ = [event async for event in completer.complete(CompletionRequest("x"))]
