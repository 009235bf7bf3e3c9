"""A draft worker whose link breaks: when it goes on, and when it gives up."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from inference.commit import Commit, FinishReason
from inference.config import ConnectionConfig, DraftConfig
from inference.errors import CapacityError, UnavailableError
from inference.request import GenerationRequest, SamplingParams
from inference.text.vocabulary import Vocabulary
from inference.workers.draft import worker as module
from inference.workers.draft.worker import DraftWorker

REQUEST = GenerationRequest((5, 6), SamplingParams(seed=1), max_new_tokens=4)
FULL = CapacityError("all 1 slots are busy", retry_after_s=1.0)
LOST = UnavailableError("the link is gone")


class OneDraft:
    """Engine and session at once, as far as the worker looks at them."""

    def __init__(self) -> None:
        self.committed = list(REQUEST.prompt_token_ids)

    async def compiled(self, grammar: object) -> None:
        return None

    def open(self, token_ids: object, sampling: object, **others: object) -> OneDraft:
        return self

    async def admitted(self) -> None:
        pass

    def forget_sent(self) -> None:
        pass

    def close(self, draft: object) -> None:
        pass


async def generated(
    monkeypatch: pytest.MonkeyPatch, *streams: Exception | Commit, timeout_s: float = 30.0
) -> list[int]:
    """Tokens from streams that each give a commit, or fail."""
    left = list(streams)

    async def stream(self: DraftWorker, request: Any, draft: OneDraft, origin: Any) -> AsyncGenerator[Commit, None]:
        step = left.pop(0)
        if isinstance(step, Exception):
            raise step
        draft.committed.extend(step.token_ids)
        yield step
        if step.finish_reason is None:
            raise LOST

    monkeypatch.setattr(DraftWorker, "_stream", stream)
    monkeypatch.setattr(module, "REDIAL_S", 0.001)
    config = DraftConfig(ConnectionConfig("127.0.0.1", 1), reconnect_timeout_s=timeout_s)
    engine: Any = OneDraft()
    worker = DraftWorker(engine, engine, config=config, vocabulary=Vocabulary("f", 288), max_length=64)
    return [token_id async for commit in worker.generate(REQUEST) for token_id in commit.token_ids]


async def test_a_resume_waits_for_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The story: the request's own lost session still held the only slot, and the resume failed as any new request."""
    last = Commit(3, (8,), finish_reason=FinishReason.LENGTH)
    assert await generated(monkeypatch, Commit(2, (7,)), LOST, FULL, FULL, last) == [7, 8]


async def test_a_new_request_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapacityError):
        await generated(monkeypatch, FULL)


async def test_a_slot_that_never_comes_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="slots are busy"):
        await generated(monkeypatch, Commit(2, (7,)), *[FULL] * 500, timeout_s=0.05)
