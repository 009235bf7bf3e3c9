"""Tests of the gRPC protocol as docs/protocol.md and the .proto describe it, by a client made from only these two."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.serving.processes import ServerProcess
from tests.support.raw_worker import RawSession, after, attach, below, end_of, proposing, raw_worker

pytestmark = pytest.mark.slow

PROMPT = (2, 3, 5, 8, 13, 21)
NUM_PROMPT = len(PROMPT)
VOCAB_SIZE = 288


@dataclass(frozen=True)
class Peer:
    """A target's address, its model's description, and the 24 tokens it gives after PROMPT without draft tokens."""

    address: str
    card: pb.GetModelResponse
    answer: list[int]

    @asynccontextmanager
    async def session(self, **fields: Any) -> AsyncGenerator[RawSession, None]:
        """Send a request from a client with a draft worker; yield the session of both.

        The target waits for each of the worker's proposals, unless `fields` of the request change that.
        """
        async with raw_worker(self.address) as worker:
            yield worker.request(asked(**fields)).send()


def asked(**fields: Any) -> pb.GenerateRequest:
    """Return a request for 12 tokens after PROMPT, with `fields` changed.

    By default the target waits for each proposal of its draft worker, up to 64 tokens.
    """
    sampling = pb.SamplingParams(temperature=1.0, seed=11)
    usual = {"token_ids": pb.TokenIds(ids=PROMPT), "sampling": sampling, "max_new_tokens": 12, "ignore_eos": True}
    return pb.GenerateRequest(**{**usual, "gamma": 64, "schedule": pb.SCHEDULE_SYNC, **fields})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def peer(target: ServerProcess) -> Peer:
    async with open_channel(target.address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        card = await stub.GetModel(pb.GetModelRequest(), timeout=60)
        stream = stub.Generate(asked(gamma=0, max_new_tokens=24), timeout=60)
        answer = [token_id async for message in stream for token_id in message.delta.token_ids]
    return Peer(target.address, card, answer)


def wrong(token_id: int) -> int:
    """Return a token id that differs from `token_id`."""
    return token_id % (VOCAB_SIZE - 1) + 1


async def verified(session: RawSession) -> tuple[list[int], int, int]:
    """Read the next pass's result; return its tokens, and its numbers of draft tokens and of accepted ones."""
    delta = await session.delta()
    assert delta is not None
    return list(delta.token_ids), delta.num_draft_tokens, delta.num_accepted_tokens


async def test_drafts_are_accepted_up_to_the_first_difference(peer: Peer) -> None:
    answer = peer.answer
    async with peer.session() as session:
        await session.propose(after(NUM_PROMPT, *answer[:2], wrong(answer[2]), answer[3]))
        assert await verified(session) == (answer[:3], 4, 2)
        assert session.deltas[0].timings.compute_us > 0
        assert session.deltas[0].num_received_tokens == 4


async def test_the_surviving_branch_is_verified_next(peer: Peer) -> None:
    """After a branch of draft tokens is rejected, the branch that begins with the target's token is verified next."""
    answer = peer.answer
    async with peer.session(max_new_tokens=20) as session:
        await session.propose(
            after(NUM_PROMPT, answer[0], wrong(answer[1]), wrong(answer[2])),  # nodes 0, 1, 2
            below(0, *answer[1:5]),  # nodes 3 .. 6, beside node 1
            below(6, *answer[5:7]),
        )
        assert (await verified(session))[0] == answer[:2]
        assert await verified(session) == (answer[2:8], 5, 5)


async def test_late_branches_count_as_far_as_they_agree(peer: Peer) -> None:
    answer = peer.answer
    async with peer.session(max_new_tokens=20) as session:
        await session.propose(after(NUM_PROMPT, *answer[:2]))  # nodes 0, 1; commits three tokens
        await verified(session)
        await session.propose(after(NUM_PROMPT, *answer[:6]))  # as if sent before the commit arrived
        assert await verified(session) == (answer[3:7], 3, 3)
        await session.propose(below(1, *answer[2:10]))  # its parent was committed long ago
        assert await verified(session) == (answer[7:11], 3, 3)


async def test_lost_branches_are_ignored_in_step(peer: Peer) -> None:
    """Draft tokens that contradict committed tokens, or follow a rejected draft token, are ignored without an error."""
    answer = peer.answer
    async with peer.session(max_new_tokens=20) as session:
        await session.propose(after(NUM_PROMPT, wrong(answer[0]), 7, 7))  # nodes 0 .. 2 lose
        await verified(session)
        await session.propose(after(NUM_PROMPT, wrong(answer[0]), 9))  # nodes 3, 4: too late
        await session.propose(below(2, 7, 7, 7))  # nodes 5 .. 7: after a node that has lost
        await session.propose(below(6, 7))  # node 8: likewise
        await session.propose(after(NUM_PROMPT + 1, answer[1]), below(9, answer[2], answer[3]))  # node 9 lives
        assert await verified(session) == (answer[1:5], 3, 3)


async def test_a_resumed_answer_has_drafts_again(peer: Peer) -> None:
    """A request that names the committed tokens of an earlier answer goes on with the same tokens.

    Draft tokens are accepted again from its first pass on.
    """
    answer = peer.answer
    async with raw_worker(peer.address) as worker:
        began = worker.request(asked(max_new_tokens=1)).send()
        await began.propose()
        await began.rest()
        assert began.started is not None
        origin = {"model_id": began.started.model_id, "prompt_digest": began.started.prompt_digest}
        for num_committed in (1, 7, 22):
            committed = pb.TokenIds(ids=answer[:num_committed])
            request = asked(committed_token_ids=committed, max_new_tokens=24, **origin)
            session = worker.request(request)
            await session.propose(after(NUM_PROMPT + num_committed, *answer[num_committed:23]))
            session.send()
            assert await verified(session) == (answer[num_committed:], 23 - num_committed, 23 - num_committed)
            assert session.deltas[0].position == NUM_PROMPT + num_committed


async def test_a_stop_token_ends_the_answer(peer: Peer) -> None:
    answer = peer.answer
    place = next(i for i in range(2, 10) if answer[i] not in answer[:i])
    async with peer.session(stop_token_ids=[answer[place]]) as session:
        await session.propose(after(NUM_PROMPT, *answer[:11]))
        assert await session.rest() == answer[: place + 1]
        assert session.deltas[-1].finish_reason == pb.FINISH_REASON_STOP
        await session.propose(after(NUM_PROMPT, answer[0]))  # it was on its way
        again = session.worker.request(asked()).send()
        await again.propose(after(NUM_PROMPT, *answer[:11]))
        assert await again.rest() == answer[:12]


LIES = {
    "a node that was never proposed": [below(0, 5)],
    "a node of a later branch": [after(NUM_PROMPT, 5), below(0, 5), below(3, 5)],
    "a prefix longer than the sequence": [after(NUM_PROMPT + 1, 5)],
    "a token outside the vocabulary": [after(NUM_PROMPT, 5, VOCAB_SIZE)],
}


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_lie_ends_the_help_of_its_session_alone(peer: Peer, lie: list[pb.Branch], when: str) -> None:
    """After an invalid proposal for a request, the target closes its session with the draft worker.

    The request goes on without draft tokens, and is right; the worker's other requests keep their draft tokens.
    """
    async with raw_worker(peer.address) as worker:
        session, other = worker.request(asked()), worker.request(asked()).send()
        if when == "early":
            await session.propose(*lie)
            session.send()
        else:
            await session.send().propose(*lie)
        assert await worker.closed() == session.name.hex()
        await session.propose(after(NUM_PROMPT, *peer.answer[:3]))  # counts no more
        assert await session.rest() == peer.answer[:12]
        assert not any(delta.num_received_tokens for delta in session.deltas[1:])
        await other.propose(after(NUM_PROMPT, *peer.answer[:11]))
        assert await verified(other) == (peer.answer[:12], 11, 11)


OUT_OF_ORDER = {
    "a proposal before Attach": [proposing("x")],
    "nothing before Attach": [pb.AssistRequest()],
    "Attach twice": ["attach", "attach"],
    "nothing later": ["attach", pb.AssistRequest()],
    "a branch without a parent": ["attach", proposing("x", pb.Branch(token_ids=[5]))],
    "a branch without a token": ["attach", proposing("x", after(NUM_PROMPT))],
    "a branch longer than a tree": ["attach", proposing("x", after(NUM_PROMPT, *[5] * 257))],
}


@pytest.mark.parametrize("messages", OUT_OF_ORDER.values(), ids=OUT_OF_ORDER)
async def test_messages_that_are_none_end_the_stream(peer: Peer, messages: list[Any]) -> None:
    async with open_channel(peer.address) as channel:
        call = rpc.VerificationServiceStub(channel).Assist(timeout=60)
        for message in messages:
            await call.write(attach(peer.card, is_private=True) if message == "attach" else message)
        assert (await end_of(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
