"""Tests of draft workers that use only grpcio and the .proto, at a scripted target in this process, over real sockets.

A private worker drafts for requests of its own connection and account, a worker of the pool for those of all clients.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.grpc_comm import options, secured
from specdec.grpc_comm.call import Call
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.tls import ServerTls
from specdec.inference.config import DialSecurity
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.request import Schedule
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completion import CompletionRequest
from specdec.inference.workers.drafting import service, stream
from specdec.inference.workers.drafting.stream import AssistStream, Offer
from tests.integration.test_walls import PROMPT, RAW, WORDS, Target, serving
from tests.support.certificates import pki
from tests.support.edges import Edge, edge
from tests.support.models import tiny_tokenizer
from tests.support.ports import entry, token_of
from tests.support.raw_worker import OWN_CONNECTION, RawSession, RawWorker, after, end_of, proposing, raw_worker
from tests.support.scripted import ScriptedProposer, tokens_at, until
from tests.support.servers import completed_by, until_attached

ANSWER = tokens_at(3, 40)
IN_ROUNDS = pb.GenerateRequest(**PROMPT, max_new_tokens=40, gamma=8, schedule=pb.SCHEDULE_SYNC)
RUNNING_AHEAD = pb.GenerateRequest(**PROMPT, max_new_tokens=40, gamma=8, schedule=pb.SCHEDULE_ASYNC)
REQUESTS = pytest.mark.parametrize("request_", [IN_ROUNDS, RUNNING_AHEAD], ids=["rounds", "ahead"])


def bearer(name: str) -> tuple[str, str]:
    """Return gRPC metadata with the access token of the account `name`."""
    return "authorization", f"Bearer {token_of(name)}"


def num_kept(target: Target, name: str) -> int:
    """Return how many draft tokens the target stores for a session until its request arrives.

    `name` is the session's name in hexadecimal digits.
    """
    records = target.pool._workers.values()
    kept = [early for record in records for key, early in record.early.items() if key.endswith(f"/{name}")]
    return sum(len(branch.token_ids) for early in kept for branch in early.branches)


async def sent_after(target: Target, session: RawSession, *branches: pb.Branch) -> RawSession:
    """Send draft tokens for a session and, once the target has them, its request; return the session."""
    await session.propose(*branches)
    await until(lambda: num_kept(target, session.name.hex()) > 0)
    return session.send()


@pytest.fixture
def auth_file(tmp_path: Path) -> Path:
    path = tmp_path / "auth.toml"
    accounts = [entry(name, role) for name, role in (("alice", "client"), ("bob", "client"), ("dora", "draft"))]
    path.write_text("".join(accounts) + entry("gate", "client", "speaks_for_others = true"))
    return path


async def answered_without(session: RawSession) -> bool:
    """Read the answer of a session, which must be right; return True if the target received no draft token for it."""
    await session.rest()
    counted = sum(delta.num_received_tokens for delta in session.deltas)
    assert session.token_ids == ANSWER
    return counted == 0


@pytest.mark.parametrize("is_early", [True, False])
async def test_only_the_session_s_own_account_may_draft_for_it(auth_file: Path, is_early: bool) -> None:
    """A draft worker of another connection or account cannot draft for a request, even if it knows its name."""
    async with (
        serving(auth_file=auth_file) as target,
        raw_worker(target.address, bearer("alice")) as alice,
        raw_worker(target.address, bearer("alice")) as elsewhere,
    ):
        as_bob = replace(alice, metadata=(bearer("bob"),))
        for asks, drafts in ((alice, elsewhere), (as_bob, alice)):
            session = asks.request(RUNNING_AHEAD)
            stranger = drafts.request(RUNNING_AHEAD, name=session.name)
            if is_early:
                await sent_after(target, stranger, after(3, *ANSWER[:3]))
                stranger.call.cancel()
                await stranger.propose(after(3, *ANSWER[:3]))
            session.send()
            await stranger.propose(after(3, *ANSWER))
            assert await answered_without(session)


async def test_a_server_drafts_for_the_users_that_it_names(auth_file: Path) -> None:
    """A server that sends requests in the names of its users, and has a draft worker, gets drafts for these requests.

    Regression: the target looked for the request's draft worker in the user's account, while the worker had attached
    without a user.
    """
    async with serving(auth_file=auth_file) as target, raw_worker(target.address, bearer("gate")) as worker:
        for_user = replace(worker, metadata=(bearer("gate"), ("x-specdec-user", "ann")))
        session = for_user.request(IN_ROUNDS).send()
        await session.propose(after(3, *ANSWER))
        assert await session.rest() == ANSWER
        assert session.deltas[0].num_accepted_tokens > 0


@pytest.mark.parametrize("is_known", [True, False], ids=["accounts", "addresses"])
async def test_a_client_leaves_places_for_the_workers_of_others(
    auth_file: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """One client cannot attach so many draft workers for its own requests that other clients can attach none.

    A client is an account, or an address if the server has no accounts. Regression: one account could attach all 1,024
    workers that a target accepts; later half of them, while one address could still attach all.
    """
    monkeypatch.setattr(service, "MAX_WORKERS", 20)
    async with serving(auth_file=auth_file if is_known else None) as target, AsyncExitStack() as stack:

        async def attach(name: str) -> None:
            await stack.enter_async_context(raw_worker(target.address, *([bearer(name)] if is_known else [])))

        for name, share in (("alice", 3), ("bob", 2)) if is_known else (("127.0.0.1", 3),):
            for _ in range(share):
                await attach(name)
            with pytest.raises(grpc.aio.AioRpcError, match=f"{name} has {share} private draft workers") as caught:
                await attach(name)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stack.aclose()
        await until(lambda: not target.pool._workers)
        await attach("alice")


@pytest.mark.parametrize("kind", ["propose", "decline"])
@pytest.mark.parametrize("name", ["x" * 100_000, "", "0123456789ABCDEF" * 2])
async def test_a_private_worker_names_sessions_as_requests_do(kind: str, name: str) -> None:
    """The stream of a draft worker ends with an error if it drafts under a session name that no request can have.

    Regression: names of any length were kept until their request came; 8 streams of 64 names took 300 MB of a target.
    """
    messages = {
        "propose": pb.AssistRequest(propose=pb.AssistPropose(session_id=name)),
        "decline": pb.AssistRequest(decline=pb.AssistDecline(session_id=name)),
    }
    async with serving() as target, raw_worker(target.address) as worker:
        await worker.call.write(messages[kind])
        code, text = await end_of(worker.call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "must be draft_session of its request, in 32 hexadecimal digits" in text
        assert len(text) < 300


def sent_tokenizers() -> list[pb.Attached]:
    """Return all messages in this process's memory that contain a tokenizer for a draft worker."""
    return [each for each in gc.get_objects() if type(each) is pb.Attached and each.tokenizer]


async def test_a_tokenizer_is_sent_to_workers_of_the_pool_alone_and_not_kept() -> None:
    """A draft worker with another tokenizer gets the target's if it is in the pool; a private one is refused.

    A private worker drafts only for its own client. The target does not keep its message with the tokenizer.
    Regression: each stream kept its copy, 8 MB for a large vocabulary, and a client could have 512 of them.
    """
    async with serving(tokenizer=Tokenizer(tiny_tokenizer(), frozenset())) as target:
        asked: dict[str, Any] = {"takes_tokenizer": True, "tokenizer_fingerprint": "another"}
        with pytest.raises(grpc.aio.AioRpcError, match="vocabulary"):
            async with raw_worker(target.address, **asked):
                pass
        async with raw_worker(target.address, is_private=False, **asked) as worker:
            await worker.call.write(pb.AssistRequest(slots=pb.AssistSlots(num_slots=3)))
            await until(lambda: [each.num_slots for each in target.pool._workers] == [3])
            assert not sent_tokenizers()


class CallBalancer(grpc.GenericRpcHandler):
    """Proxy that divides a connection's calls: draft workers' streams (Assist) go to one server, others to another."""

    def __init__(self, assists: grpc.aio.Channel, others: grpc.aio.Channel) -> None:
        self._assists = assists
        self._others = others

    def service(self, details: Any) -> Any:
        channel = self._assists if details.method.endswith("/Assist") else self._others

        async def forward(messages: AsyncIterator[bytes], _: object) -> AsyncGenerator[bytes, None]:
            async for message in channel.stream_stream(details.method, **RAW)(messages):
                yield message

        return grpc.stream_stream_rpc_method_handler(forward)


@asynccontextmanager
async def balanced(assists: Target, others: Target) -> AsyncGenerator[int, None]:
    """Run a proxy that sends draft workers' streams to one target and all other calls to another; yield its port."""
    server = grpc.aio.server()
    async with (
        grpc.aio.insecure_channel(assists.address, options=OWN_CONNECTION) as first,
        grpc.aio.insecure_channel(others.address, options=OWN_CONNECTION) as second,
    ):
        server.add_generic_rpc_handlers((CallBalancer(first, second),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield port
        await server.stop(0)


async def num_drafted(client: Edge, num_tokens: int = 40) -> int:
    """Complete a request, and check its tokens; return how many draft tokens the target verified for it."""
    await until_attached(client.worker)
    request = CompletionRequest((1, 2, 3), max_new_tokens=num_tokens, ignore_eos=True)
    (completion,) = await completed_by(client.completer, [request])
    assert completion.token_ids == ANSWER[:num_tokens]
    return completion.num_draft_tokens


async def test_an_edge_follows_its_requests_to_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a client's requests move to a new connection, so do the draft tokens of its own draft worker.

    Regression: requests moved to a new connection after half an hour, while draft tokens went over the old one.
    """
    ages = [(name, 1000 if name == "grpc.max_connection_age_ms" else value) for name, value in options.SERVER_OPTIONS]
    monkeypatch.setattr(options, "SERVER_OPTIONS", ages)
    async with serving() as target, edge(target.server.port, Schedule.SYNC) as client, asyncio.timeout(120):
        num_undrafted = 0
        seen: set[str] = set()
        while len(seen) < 4:
            await asyncio.sleep(0.1)  # requests come now and then
            seen.update(worker.id for worker in target.pool._workers)
            num_undrafted += await num_drafted(client, 24) == 0
        assert num_undrafted <= 3  # requests that were sent just when their connection grew old


async def test_an_edge_follows_its_requests_after_a_change_of_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a client's requests move to a new connection, as certificates changed, so do its draft worker's tokens.

    Regression: requests used a new connection after the change, and draft tokens the old one for another hour.
    """
    monkeypatch.setattr(secured, "LOOK_S", 0.05)
    trust = pki(tmp_path)
    tls = ServerTls(*trust.pair("server"))
    async with serving(credentials=tls.grpc_credentials()) as target:
        secure = edge(target.server.port, Schedule.SYNC, security=DialSecurity(trust.ca))
        async with secure as client, asyncio.timeout(60):
            assert await num_drafted(client, 24) > 0
            (before,) = target.pool._workers
            trust.ca.write_bytes(trust.ca.read_bytes() + b"\n")
            await until(lambda: bool(target.pool._workers) and before not in target.pool._workers)
            assert await num_drafted(client, 24) > 0


async def test_a_proxy_that_parts_the_calls_of_a_connection(caplog: pytest.LogCaptureFixture) -> None:
    """Behind a proxy that sends one connection's calls to several targets, answers are right, but have no draft tokens.

    Target and client log the reason, the client only once. The client counts its requests without draft tokens.
    """
    caplog.set_level(logging.INFO)
    async with serving() as one, serving() as other, balanced(one, other) as port, edge(port) as client:
        while "a proxy may send calls of one connection to different servers" not in caplog.text:
            assert await num_drafted(client) == 0
        for _ in range(3):
            assert await num_drafted(client) == 0
        assert client.worker.num_undrafted >= 3
    text = caplog.text
    assert "its private draft worker is not attached on its connection" in text
    assert text.count("a proxy may send calls of one connection to different servers") == 1


async def opened(worker: RawWorker) -> pb.AssistOpen:
    """Wait until the target assigns a session to a draft worker of its pool; return the message with that session."""
    while (response := await worker.call.read()).WhichOneof("message") != "open":
        pass
    opening: pb.AssistOpen = response.open
    return opening


@REQUESTS
@pytest.mark.parametrize("version", [1, 2])
async def test_a_pool_worker_gets_the_schedule_of_the_request(request_: pb.GenerateRequest, version: int) -> None:
    """A draft worker of the pool drafts in the way that the request names.

    The target waits for each proposal, or the worker runs ahead. With protocol version 1 a worker always runs ahead.
    """
    async with serving() as target, raw_worker(target.address, is_private=False, protocol_version=version) as worker:
        session = worker.request(request_).send()
        opening = await opened(worker)
        assert opening.open.schedule == (request_.schedule if version == 2 else pb.SCHEDULE_ASYNC)
        assert opening.open.gamma == 8
        await worker.call.write(proposing(opening.session_id, after(3, *ANSWER)))
        assert await session.rest() == ANSWER


@pytest.mark.parametrize("end", ["silence", "leaving", "a lie"])
async def test_rounds_go_on_without_a_failed_worker(end: str) -> None:
    """If the target waits for a draft worker that is silent, leaves or sends an invalid token, the request goes on.

    It is then decoded without draft tokens, and its tokens are right.
    """
    async with serving(idle_timeout_s=0.3) as target, raw_worker(target.address, is_private=False) as worker:
        session = worker.request(IN_ROUNDS).send()
        help_id = (await opened(worker)).session_id
        await worker.call.write(proposing(help_id, after(3, *ANSWER[:2])))
        first = await session.delta()
        assert first is not None
        assert first.num_accepted_tokens == 2
        if end == "leaving":
            worker.call.cancel()
        elif end == "a lie":
            await worker.call.write(proposing(help_id, after(3, 10**6)))
        assert await session.rest() == ANSWER
        if end == "a lie":
            assert (await end_of(worker.call))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_ends_while_it_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft worker's stream that tries to connect to its target can be cancelled.

    Regression: as it tried again, Python 3.11's `wait_for` lost the cancellation, and the process never ended.
    """
    monkeypatch.setattr(stream, "REDIAL_S", 1e6)
    lost = AssistStream(DraftEngine(ScriptedProposer()), "127.0.0.1:1", Offer(WORDS, gamma=4, num_slots=1))
    async with grpc.aio.insecure_channel(lost.address) as channel:
        running = asyncio.create_task(lost.run(channel))
        await asyncio.sleep(0.3)  # it waits for a target now, or this test shows nothing
        lost.dial_now()
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=60)
        running.cancel()
        assert done


@pytest.mark.parametrize("ticks", range(5))
async def test_a_request_that_is_cancelled_twice_frees_its_draft_slot(ticks: int) -> None:
    """A request that is cancelled twice frees its sequence's slot in the draft engine.

    Regression: the second cancellation came while the first one cleaned up, and the slot was lost for ever.
    """
    async with serving() as target, edge(target.server.port) as client:

        async def ask() -> None:
            async for _ in client.completer.complete(CompletionRequest((1, 2, 3), max_new_tokens=900, ignore_eos=True)):
                pass

        asking = asyncio.create_task(ask())
        await until(lambda: client.engine.num_running == 1)
        asking.cancel()
        for _ in range(ticks):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: client.engine.num_running == 0)


async def test_attached_means_that_the_worker_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target tells a draft worker that it is attached only when it can already be used for requests.

    Regression: the target said so too early, and a request right after it got no draft tokens.
    """
    write = Call.write

    async def busy(call: Call, message: Any) -> None:
        await write(call, message)
        await asyncio.sleep(0.2)  # other work of the event loop, until the writer goes on

    async with serving() as target:
        monkeypatch.setattr(Call, "write", busy)
        async with raw_worker(target.address) as worker:
            session = worker.request(IN_ROUNDS).send()
            await session.propose(after(3, *ANSWER[:8]))
            first = await session.delta()
            assert first is not None
            assert first.num_accepted_tokens == 8
            session.call.cancel()
