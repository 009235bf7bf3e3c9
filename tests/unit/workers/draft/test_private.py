"""A draft worker whose link breaks: when it goes on, and when it gives up."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpc_comm.guard import Gate
from grpc_comm.server import Server
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.tls import ServerTls
from inference.commit import Answer, Commit, FinishReason, Opened
from inference.config import ConnectionConfig, DialSecurity, DraftConfig
from inference.engine.loop import SHUTTING_DOWN
from inference.errors import CapacityError, DeadlineError, HandshakeError, InternalError, UnavailableError
from inference.request import GenerationRequest, SamplingParams
from inference.scheduling.link import Link
from inference.scheduling.retry_budget import RetryBudget
from inference.text.vocabulary import Vocabulary
from inference.workers import resuming as module
from inference.workers.draft.verify_stream import StreamState, VerifyStream
from inference.workers.draft.worker import DraftWorker
from inference.workers.fleet import Fleet
from tests.support.answers import tokens_of
from tests.support.certificates import pki

REQUEST = GenerationRequest((5, 6), SamplingParams(seed=1), max_new_tokens=4)
FULL = CapacityError("all 1 slots are busy", retry_after_s=1.0)
LOST = UnavailableError("the link is gone")
BROKEN = UnavailableError("the target died over it")
ENDED = UnavailableError("cancelled")
FAILED = InternalError("the model failed")
NOBODY = ConnectionConfig("127.0.0.1", 1)


class OneDraft:
    """Engine and session at once, as far as the worker looks at them."""

    error: Exception | None = None
    is_waiting = False

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
    monkeypatch: pytest.MonkeyPatch,
    *streams: Exception | Commit,
    timeout_s: float = 30.0,
    link: ConnectionConfig = NOBODY,
) -> list[int]:
    """Tokens from streams that each give a commit, or fail."""
    left = list(streams)

    async def stream(
        self: DraftWorker, request: Any, draft: OneDraft, state: Any, replica: Any, *, deadline_s: float
    ) -> AsyncGenerator[Answer, None]:
        step = left.pop(0)
        if isinstance(step, Exception):
            state.answered = step is BROKEN
            if step is ENDED:
                draft.error = draft.error or UnavailableError(SHUTTING_DOWN)
            raise step
        draft.committed.extend(step.token_ids)
        yield Opened()
        yield step
        if step.finish_reason is None:
            raise LOST if step.token_ids else left.pop(0)  # type: ignore[misc]

    monkeypatch.setattr(DraftWorker, "_stream", stream)
    monkeypatch.setattr(module, "REDIAL_S", 0.001)
    config = DraftConfig(replace(link, reconnect_timeout_s=timeout_s))
    engine: Any = OneDraft()
    async with Fleet(config.connection.targets, config.connection.security) as fleet:
        worker = DraftWorker(engine, fleet, config=config, vocabulary=Vocabulary("f", 288), max_length=64)
        return await tokens_of(worker.generate(REQUEST))


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


LAST = Commit(3, (8,), finish_reason=FinishReason.LENGTH)


async def test_a_failed_pass_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are a function of what is committed: INTERNAL of one replica is no reason to give up."""
    assert await generated(monkeypatch, Commit(2, (7,)), FAILED, LAST) == [7, 8]


@pytest.mark.parametrize(("failure", "error"), [(BROKEN, UnavailableError), (FAILED, InternalError)])
async def test_a_request_that_breaks_targets_is_not_carried_on(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, error: type[Exception]
) -> None:
    """The story: a prompt that ran a target out of memory was carried to each replica that came back, for ever."""
    with pytest.raises(error, match=r"died over it|model failed"):
        await generated(monkeypatch, failure, failure, failure, LAST)


async def test_a_target_no_longer_trusted_is_not_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """gRPC calls both UNAVAILABLE; dialling for 30 s would only hide why."""
    ours, theirs = pki(tmp_path / "ours"), pki(tmp_path / "theirs")
    gate = Gate(ServerTls(*theirs.pair("server")).grpc_credentials())
    target = Server("127.0.0.1:0", [], status_of=lambda _: None, gate=gate)
    await target.open()
    link = ConnectionConfig("127.0.0.1", target.port, security=DialSecurity(ours.ca))
    with pytest.raises(HandshakeError, match="unable to get local issuer certificate"):
        await generated(monkeypatch, Commit(2, (7,)), LOST, LAST, link=link)
    await target.close()
    assert await generated(monkeypatch, Commit(2, (7,)), LOST, LAST, link=link) == [7, 8]  # nobody is there: lost


async def test_a_target_still_starting_is_no_break(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await generated(monkeypatch, *[LOST] * 5, Commit(2, (7,)), LAST) == [7, 8]


async def test_the_end_of_this_server_is_no_lost_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The story: in rounds, the end of the grace read as a lost target, and the client was told "cancelling"."""
    with pytest.raises(UnavailableError, match="shutting down"):
        await generated(monkeypatch, Commit(2, (7,)), ENDED, LAST)


async def test_a_drafts_failure_keeps_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The story: a request over which the draft's model failed, in rounds, was told that the server was shutting
    down, and a gateway in front asked it again and again."""
    monkeypatch.setattr(OneDraft, "error", FAILED)
    with pytest.raises(InternalError, match="the model failed"):
        await generated(monkeypatch, Commit(2, (7,)), ENDED, LAST)


async def test_commits_without_a_token_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InternalError, match="model failed"):
        await generated(monkeypatch, *(Commit(2, ()), FAILED) * 50)


class Wire:
    """A Verify call that answers what it is told, in order."""

    def __init__(self, *answers: pb.VerifyResponse) -> None:
        self.answers = list(answers)
        self.written: list[pb.VerifyRequest] = []

    async def write(self, message: pb.VerifyRequest) -> None:
        self.written.append(message)

    async def read(self) -> pb.VerifyResponse:
        return self.answers.pop(0)


def committing(position: int, *token_ids: int) -> pb.VerifyResponse:
    return pb.VerifyResponse(commit=pb.Commit(position=position, token_ids=token_ids))


OPENED = pb.VerifyResponse(opened=pb.Opened(session_id="s1", model_id="m"))


@pytest.mark.parametrize(
    ("commit", "words"), [(committing(4, 9), "position 4 came where 3 is next"), (committing(3, 288), "token 288")]
)
async def test_no_lost_or_foreign_commit_passes_for_an_answer(commit: pb.VerifyResponse, words: str) -> None:
    """The story: a middlebox swallowed a frame, and 5 of 15 answers were other tokens with code OK."""
    call: Any = Wire(OPENED, committing(2, 7), commit)
    stream = VerifyStream(call, "target:1", StreamState(), Link())
    await stream.open(REQUEST, Vocabulary("f", 288))
    assert (await stream.commit()).token_ids == (7,)
    with pytest.raises(UnavailableError, match=words):
        await stream.commit()


async def test_a_stream_broken_early_is_retried_slowly() -> None:
    """gRPC's 36066: a refusal that meets a write is lost, and read as a broken link: 30 s of dialling for a 429."""
    state = StreamState(is_cautious=True)
    call: Any = Wire(OPENED, committing(2, 7))
    stream = VerifyStream(call, "target:1", state, Link())
    await stream.open(REQUEST, Vocabulary("f", 288))
    assert (state.answered, state.provenance.model_id, len(call.written)) == (True, "m", 1)
    assert (await stream.commit()).token_ids == (7,)


async def test_a_targets_own_time_limit_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the 5 s that it waits for a first message; the request's own deadline is another matter."""
    assert await generated(monkeypatch, Commit(2, (7,)), DeadlineError("no first message"), LAST) == [7, 8]


async def test_a_spent_budget_means_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process all requests together: a target that fails is not helped by all who ask again at once."""
    turns = iter([False, False, True])
    monkeypatch.setattr(RetryBudget, "take", lambda self, now, spare: next(turns))
    assert await generated(monkeypatch, Commit(2, (7,)), LAST) == [7, 8]
    monkeypatch.setattr(RetryBudget, "take", lambda self, now, spare: False)
    with pytest.raises(UnavailableError, match="link is gone"):
        await generated(monkeypatch, Commit(2, (7,)), LAST, timeout_s=0.05)
