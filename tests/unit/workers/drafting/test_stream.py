"""A draft worker that drafts for several targets: what happens to one target does not affect the others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.grpc_comm import names
from specdec.grpc_comm.guard import Gate
from specdec.grpc_comm.server import Server
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.grpc_comm.tls import ServerTls
from specdec.inference.caller import ANYBODY, NamesRequests, request_context
from specdec.inference.config import DialSecurity
from specdec.inference.engine.draft import DraftEngine, TargetWords
from specdec.inference.engine.target_session import TargetSession
from specdec.inference.errors import HandshakeError, IncompatibleDraftError, InternalError, InvalidRequestError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import GenerationRequest
from specdec.inference.serving.processes import free_port
from specdec.inference.text.tokenizer import MAX_PACKED_BYTES, Tokenizer
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.drafting import stream as module
from specdec.inference.workers.drafting.pool_worker import PoolWorker
from specdec.inference.workers.drafting.service import StreamWorker
from specdec.inference.workers.drafting.stream import AssistStream, Offer
from tests.support.certificates import pki
from tests.support.http2 import answering
from tests.support.models import tiny_tokenizer
from tests.support.ports import listening
from tests.support.scripted import VOCAB_SIZE, ScriptedProposer, token_at, until

OFFER = Offer(Vocabulary("f", VOCAB_SIZE), gamma=4, num_slots=4)
REFUSAL = IncompatibleDraftError("another vocabulary")


def pool_worker(*addresses: str, offer: Offer = OFFER) -> PoolWorker:
    engine: Any = None
    return PoolWorker(engine, addresses, offer, Metrics("tiny"))


async def test_a_target_that_refused_is_asked_again_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft worker drafts for other targets while one refuses it, and asks that one again after a while.

    Regression: a worker never returned to a target that had refused it once, and reported itself ready.
    """
    monkeypatch.setattr(module, "REFUSED_S", 0.01)
    asked: list[str] = []

    async def run(self: AssistStream, channel: object) -> None:
        asked.append(self.address)
        if self.address == "a:1" and asked.count("a:1") % 3:
            raise REFUSAL
        await asyncio.sleep(3600)

    monkeypatch.setattr(AssistStream, "run", run)
    both = pool_worker("a:1", "b:1")
    await until(lambda: asked.count("a:1") == 3)
    assert asked.count("b:1") == 1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(both.refused(), timeout=0.05)
    await both.stop(grace_s=0)
    with pytest.raises(IncompatibleDraftError, match="another vocabulary"):
        await pool_worker("a:1").refused()


async def test_an_untrusted_target_is_not_redialled_for_ever(tmp_path: Path) -> None:
    """A worker stops connecting to a target whose certificate it does not trust.

    A failed TLS handshake is UNAVAILABLE to gRPC; the worker must distinguish it from a lost connection.
    """
    ours, theirs = pki(tmp_path / "ours"), pki(tmp_path / "theirs")
    gate = Gate(ServerTls(*theirs.pair("server")).grpc_credentials())
    async with listening(gate=gate) as target, asyncio.timeout(60):
        worker = pool_worker(f"127.0.0.1:{target.port}", offer=replace(OFFER, security=DialSecurity(ours.ca)))
        with pytest.raises(HandshakeError, match="unable to get local issuer certificate"):
            await worker.refused()


async def test_a_broken_link_is_always_redialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft worker connects to its target again whenever the connection breaks, for any reason.

    Regression: a malformed frame counted as an internal error, and the worker left all of its targets.
    """
    num_tries = 0

    async def fail(self: AssistStream, stub: object) -> None:
        nonlocal num_tries
        num_tries += 1
        raise REFUSAL if num_tries == 3 else InternalError("Failed parsing HTTP/2")

    monkeypatch.setattr(AssistStream, "_attach", fail)
    monkeypatch.setattr(module, "REDIAL_S", 0.001)
    with pytest.raises(IncompatibleDraftError):
        await pool_worker("127.0.0.1:1").refused()
    assert num_tries == 3


class Target(rpc.VerificationServiceServicer):  # type: ignore[misc]
    """Stand-in for a target's Assist call; sends the messages that a test sets, and records those that it gets."""

    service_name = "specdec.v1.VerificationService"
    max_request_bytes = 1000

    def __init__(self) -> None:
        self.num_offered: list[int] = []
        self.said: asyncio.Queue[pb.AssistResponse] = asyncio.Queue()
        self.heard: list[pb.AssistRequest] = []
        self.attach: list[pb.Attach] = []
        self.tokenizer = b""
        self.ends = asyncio.Event()

    def add_to(self, server: Any) -> None:
        rpc.add_VerificationServiceServicer_to_server(self, server)

    async def Assist(self, _: object, context: Any) -> None:
        self.attach.append((await context.read()).attach)
        self.num_offered.append(self.attach[-1].num_slots)
        await context.write(pb.AssistResponse(attached=pb.Attached(tokenizer=self.tokenizer, eos_token_ids=[1])))
        listening = asyncio.create_task(self._listen(context))
        try:
            while not self.ends.is_set():
                await context.write(await self.said.get())
            self.ends.clear()
        finally:
            listening.cancel()

    async def _listen(self, context: Any) -> None:
        while isinstance(message := await context.read(), pb.AssistRequest):
            self.heard.append(message)
            if message.HasField("slots"):
                self.num_offered.append(message.slots.num_slots)

    def opens(self, name: str, *prompt: int, request_id: str = "", vocab_size: int = 0, fingerprint: str = "") -> None:
        sampling = pb.SamplingParams(seed=1)
        opening = pb.Open(prompt_token_ids=prompt, max_new_tokens=20, sampling=sampling, vocab_size=vocab_size)
        opening.tokenizer_fingerprint = fingerprint
        opened = pb.AssistOpen(session_id=name, open=opening, request_id=request_id)
        self.said.put_nowait(pb.AssistResponse(open=opened))

    def commits(self, name: str, position: int, *token_ids: int) -> None:
        commit = pb.AssistCommit(session_id=name, commit=pb.Commit(position=position, token_ids=token_ids))
        self.said.put_nowait(pb.AssistResponse(commit=commit))

    @property
    def declined(self) -> list[str]:
        return [message.decline.session_id for message in self.heard if message.HasField("decline")]

    def drafts(self, name: str) -> list[int]:
        proposals = [message.propose for message in self.heard if message.propose.session_id == name]
        return [token for proposal in proposals for branch in proposal.propose.branches for token in branch.token_ids]


@asynccontextmanager
async def attached(target: Target, port: int = 0, offer: Offer = OFFER) -> AsyncGenerator[PoolWorker, None]:
    """Attach a draft worker with two slots to the target; yield the worker."""
    server = Server(f"127.0.0.1:{port}", [target], status_of=lambda _: None)
    engine = DraftEngine(ScriptedProposer(), max_waiting=0)
    engine.start()
    worker = PoolWorker(engine, [f"127.0.0.1:{server.port}"], offer, Metrics("tiny"))
    assert "no target" in (worker.fault or "")
    await server.open()
    try:
        await until(lambda: worker.fault is None)
        yield worker
    finally:
        await worker.stop(grace_s=0)
        await engine.stop()
        await server.close()


async def test_nonsense_of_one_target_costs_that_session_alone() -> None:
    """An invalid value from a target ends the session that it is for, and no other session.

    Regression: a token id of 10^6 from one target made the draft step of all sessions fail, and an empty prompt ended
    the connection.
    """
    target = Target()
    async with attached(target) as worker:
        target.opens("foreign", 10**6)
        target.opens("empty")
        target.opens("later", 1, 2)
        target.commits("later", 2, 10**6)
        target.opens("gap", 1, 2)
        target.commits("gap", 7, 5)
        await until(lambda: target.declined == ["foreign", "empty", "later", "gap"])
        target.opens("good", 1, 2)
        target.opens("good", 1, 2, 3)
        await until(lambda: target.drafts("good")[-4:] == [token_at(position) for position in range(3, 7)])
        await until(lambda: worker._engine.num_running == 1)
        assert worker.fault is None


async def test_a_session_of_an_endless_name_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    """If a target sends a session name of 100 kB, the worker leaves it and connects again later.

    Regression: the name was written to the log, 16 times a minute, which made 1.6 MB.
    """
    target = Target()
    async with listening(target) as server, asyncio.timeout(60):
        worker = pool_worker(f"127.0.0.1:{server.port}")
        target.opens("x" * 100_000)
        with pytest.raises(InvalidRequestError, match="has 100000 characters, the limit is 256"):
            await worker.refused()
    assert not any("xxx" in record.getMessage() for record in caplog.records)


async def test_sessions_in_another_tokenizer_and_beyond_the_slots_are_declined() -> None:
    """A worker declines sessions of another tokenizer than its own, and sessions for which it has no slot.

    Regression: a worker without a free slot only logged it, and the target waited for draft tokens.
    """
    target = Target()
    async with attached(target):
        target.opens("other", 1, 2, fingerprint="g")
        target.opens("same", 1, 2, fingerprint="f")
        await until(lambda: target.declined == ["other"] and bool(target.drafts("same")))
        target.opens("second", 1, 2)
        target.opens("third", 1, 2)
        await until(lambda: target.declined == ["other", "third"])


async def test_a_tokenizer_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gets its target's tokenizer once only.

    When it attaches again after a lost connection, it already has the target's vocabulary.
    """
    tokenizer, target = Tokenizer(tiny_tokenizer(), frozenset([1])), Target()
    monkeypatch.setattr(module, "REDIAL_S", 0.001)
    target.tokenizer = tokenizer.packed() + bytes(
        MAX_PACKED_BYTES - 100_000
    )  # as long as one may be; the end is ignored
    learned: list[tuple[str, frozenset[int]]] = []

    def learn(given: Tokenizer) -> TargetWords:
        learned.append((given.fingerprint, given.eos_token_ids))
        return TargetWords(Vocabulary(given.fingerprint, given.num_ids, 100))

    offer = replace(OFFER, learn=learn)
    async with attached(target, offer=offer) as worker:
        assert learned == [(tokenizer.fingerprint, frozenset([1]))]
        assert worker.vocabulary_share == pytest.approx(100 / VOCAB_SIZE)
        target.opens("theirs", 1, 2, fingerprint=tokenizer.fingerprint)
        await until(lambda: bool(target.drafts("theirs")))
        target.tokenizer = b""
        target.ends.set()
        target.said.put_nowait(pb.AssistResponse())  # the last one
        await until(lambda: len(target.attach) > 1 and worker.fault is None)
    assert [each.tokenizer_fingerprint for each in target.attach[:2]] == ["f", tokenizer.fingerprint]
    assert target.attach[0].takes_tokenizer
    assert len(learned) == 1


async def test_a_broken_tokenizer_is_a_refusal() -> None:
    target, offer = Target(), replace(OFFER, learn=lambda _: TargetWords(OFFER.vocabulary))
    target.tokenizer = b"no zlib"
    async with listening(target) as server, asyncio.timeout(60):
        worker = pool_worker(f"127.0.0.1:{server.port}", offer=offer)
        with pytest.raises(IncompatibleDraftError, match="tokenizer cannot be read"):
            await worker.refused()


async def test_a_target_of_more_ids_is_helped_up_to_a_limit() -> None:
    """A worker drafts for a target with a larger vocabulary than its own, but declines one of four billion ids."""
    target = Target()
    async with attached(target) as worker:
        target.opens("absurd", 1, 2, vocab_size=2**32 - 1)
        target.opens("padded", 1, VOCAB_SIZE + 7, vocab_size=VOCAB_SIZE + 8)
        target.commits("padded", 2, VOCAB_SIZE + 7)
        await until(lambda: bool(target.drafts("padded")))
        assert worker.vocabulary_share == VOCAB_SIZE / (VOCAB_SIZE + 8)
        target.commits("padded", 3, VOCAB_SIZE + 8)
        await until(lambda: target.declined == ["absurd", "padded"])


async def test_a_commit_beyond_the_limit_costs_that_session_alone() -> None:
    """A commit with too many tokens ends only its own session.

    Regression: converting the 900,000 tokens of one commit stopped the event loop of all sessions.
    """
    target = Target()
    async with attached(target) as worker:
        for name, num_tokens in (("huge", 900_000), ("long", 21)):  # of 20 that `opens` asks for
            target.opens(name, 1, 2)
            target.commits(name, 2, *[5] * num_tokens)
        await until(lambda: target.declined == ["huge", "long"])
        target.opens("full", 1, 2)
        target.commits("full", 2, *[5] * 20)
        target.opens("good", 1, 2)
        await until(lambda: bool(target.drafts("good")))
        assert target.declined == ["huge", "long"]
        assert worker._engine.num_running == 2


async def test_the_log_names_the_request_that_is_attached(caplog: pytest.LogCaptureFixture) -> None:
    """A draft worker's log lines have the ids of the requests for which it drafts.

    Regression: of all processes that serve a request, only draft workers did not log its id.
    """
    caplog.handler.addFilter(NamesRequests())
    target = Target()
    async with attached(target):
        target.opens("empty", request_id="at once")  # an id has no space: a log of lines takes no other
        target.opens("gap", 1, 2, request_id="later")
        target.commits("gap", 7, 5)
        await until(lambda: target.declined == ["empty", "gap"])
    ids = [record.request for record in caplog.records if "gets no draft" in record.message]  # type: ignore[attr-defined]
    assert re.fullmatch(r"\[[0-9a-f]{32}\] ", ids[0])
    assert ids[1:] == ["[later] "]


@pytest.mark.parametrize("status", [404, 502])
async def test_a_proxy_without_a_target_is_dialled_again(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """A draft worker connects again after a proxy has answered that it has no target.

    Regression: during an update an ingress answered 404 for a second, and all workers left their target.
    """
    monkeypatch.setattr(module, "REDIAL_S", 0.01)
    port = free_port()
    engine = DraftEngine(ScriptedProposer(), max_waiting=0)
    async with answering(status, port) as proxy:
        worker = PoolWorker(engine, [f"127.0.0.1:{port}"], OFFER, Metrics("tiny"))
        await until(lambda: proxy.num_answers >= 3)
        assert not worker._task.done()
        await worker.stop(grace_s=0)


async def test_slots_are_shared_anew_when_targets_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When targets join or leave, a worker's slots are divided anew among its targets.

    Targets that stay keep their connections, and are sent the new number of slots.
    """
    monkeypatch.setattr(names, "LOOK_S", 0.01)
    targets = [Target(), Target(), Target()]
    servers = [Server("127.0.0.1:0", [target], status_of=lambda _: None) for target in targets]
    for server in servers:
        await server.open()
    where = [f"127.0.0.1:{server.port}" for server in servers]
    path = tmp_path / "targets"

    def serve(*numbers: int) -> None:
        part = tmp_path / "part"
        part.write_text("".join(f"{where[number]}\n" for number in numbers))
        part.replace(path)

    def offered() -> list[list[int]]:
        return [target.num_offered for target in targets]

    serve(0)
    worker = pool_worker(f"file://{path}")
    await until(lambda: offered() == [[4], [], []])
    serve(0, 1)
    await until(lambda: offered() == [[4, 2], [2], []])
    serve(0, 1, 2)
    await until(lambda: offered() == [[4, 2, 1], [2, 1], [1]])
    serve(0)
    await until(lambda: offered() == [[4, 2, 1, 4], [2, 1], [1]])
    assert all(stream.is_attached for stream, _ in worker._streams.values())
    await worker.stop(grace_s=0)
    for server in servers:
        await server.close()


def test_a_worker_knows_the_request_that_it_helps() -> None:
    """A draft worker is sent the id of the request for which it drafts, even if it gets the session later."""
    with request_context(ANYBODY, "abc"):
        session = TargetSession(GenerationRequest((1, 2, 3)), max_length=100, gamma=4)
    worker = StreamWorker(pb.Attach(num_slots=1), Vocabulary("f", 1000))
    worker.open(session)
    opened = worker.outbox.get_nowait().open
    assert (opened.session_id, opened.request_id) == (session.help_id, "abc")
