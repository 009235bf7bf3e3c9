"""The Verify stream as docs/protocol.md and the .proto describe it, spoken by a client that knows nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio

from grpc_comm.channel import open_channel
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.serving.processes import ServerProcess
from tests.support.raw_worker import RawSession, after, below, failure, positions, proposing, raw_session

pytestmark = pytest.mark.slow

PROMPT = (2, 3, 5, 8, 13, 21)
NUM_PROMPT = len(PROMPT)
VOCAB_SIZE = 288
MAX_LENGTH = 128
SEED = 11


@dataclass(frozen=True)
class Peer:
    """A target, and what it makes of PROMPT alone: 24 tokens."""

    address: str
    card: pb.GetModelResponse
    answer: list[int]

    def opening(self, **fields: Any) -> pb.Open:
        """A valid Open, but for `fields`."""
        defaults: dict[str, Any] = {
            "protocol_version": 1,
            "tokenizer_fingerprint": self.card.tokenizer_fingerprint,
            "vocab_size": self.card.vocab_size,
            "prompt_token_ids": PROMPT,
            "sampling": pb.SamplingParams(temperature=1.0, seed=SEED),
            "max_new_tokens": 12,
        }
        return pb.Open(**{**defaults, **fields})

    @asynccontextmanager
    async def session(self, **fields: Any) -> AsyncGenerator[RawSession, None]:
        """One that is open."""
        async with raw_session(self.address) as session:
            await session.open(self.opening(**fields))
            yield session

    async def failure(self, *messages: pb.VerifyRequest) -> tuple[grpc.StatusCode, str]:
        return await failure(self.address, *messages)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def peer(target: ServerProcess) -> Peer:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(temperature=1.0, seed=SEED),
        max_new_tokens=24,
        ignore_eos=True,
    )
    async with open_channel(target.address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        card = await stub.GetModel(pb.GetModelRequest(), timeout=10)
        stream = stub.Generate(request, timeout=30)
        answer = [token_id async for message in stream for token_id in message.delta.token_ids]
    return Peer(target.address, card, answer)


def wrong(token_id: int) -> int:
    """Any other token."""
    return token_id % (VOCAB_SIZE - 1) + 1


async def test_get_model(peer: Peer) -> None:
    card = peer.card
    assert (card.name, card.topology) == ("target", "target")
    assert (card.max_length, card.vocab_size) == (MAX_LENGTH, VOCAB_SIZE)
    assert len(card.tokenizer_fingerprint) == 16


async def test_opened_says_the_limits(peer: Peer) -> None:
    async with raw_session(peer.address) as session:
        opened = await session.open(peer.opening())
        assert opened.session_id
        assert opened.max_length == MAX_LENGTH
        assert opened.max_tree_tokens == 256


async def test_empty_proposals_ask_for_one_token_each(peer: Peer) -> None:
    answer = peer.answer
    async with peer.session(max_new_tokens=3) as session:
        for _ in range(3):
            await session.propose()
            commit = await session.commit()
            assert (len(commit.token_ids), commit.num_draft_tokens) == (1, 0)
        assert session.token_ids == answer[:3]
        assert positions(session.commits) == [NUM_PROMPT, NUM_PROMPT + 1, NUM_PROMPT + 2]
        reasons = [commit.finish_reason for commit in session.commits]
        assert reasons == [pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_LENGTH]
        with pytest.raises(EOFError):
            await session.read()
        assert (await session.status())[0] is grpc.StatusCode.OK


async def test_accepts_while_equal(peer: Peer) -> None:
    answer = peer.answer
    async with peer.session() as session:
        await session.propose(after(NUM_PROMPT, *answer[:2], wrong(answer[2]), answer[3]))
        commit = await session.commit()
        assert list(commit.token_ids) == answer[:3]
        assert (commit.num_draft_tokens, commit.num_accepted_tokens) == (4, 2)
        assert commit.timings.compute_us > 0


async def test_several_proposals_in_flight(peer: Peer) -> None:
    """The chain comes in pieces, none of which waits for a commit; the tokens are committed once each, in order."""
    answer = peer.answer
    async with raw_session(peer.address) as session:
        await session.call.write(pb.VerifyRequest(open=peer.opening()))
        await session.propose(after(NUM_PROMPT, answer[0]))
        for node, token_id in enumerate(answer[1:11]):
            await session.propose(below(node, token_id))
        assert (await session.read()).WhichOneof("message") == "opened"
        while len(session.token_ids) < 11:
            await session.commit()
        assert session.token_ids == answer[: len(session.token_ids)]
        starts = positions(session.commits)
        lengths = [len(commit.token_ids) for commit in session.commits]
        assert starts == [NUM_PROMPT + sum(lengths[:i]) for i in range(len(lengths))]


async def test_the_surviving_branch_is_verified_next(peer: Peer) -> None:
    """The first child is verified; the target's own token then picks the branch that had foreseen it."""
    answer = peer.answer
    async with peer.session(max_new_tokens=20) as session:
        await session.propose(
            after(NUM_PROMPT, answer[0], wrong(answer[1]), wrong(answer[2])),  # nodes 0, 1, 2
            below(0, *answer[1:5]),  # nodes 3 .. 6, beside node 1
            below(6, *answer[5:7]),
        )
        first = await session.commit()
        assert list(first.token_ids) == answer[:2]
        second = await session.commit()
        assert list(second.token_ids) == answer[2:8]
        assert (second.num_draft_tokens, second.num_accepted_tokens) == (5, 5)


async def test_late_branches_count_as_far_as_they_agree(peer: Peer) -> None:
    answer = peer.answer
    async with peer.session(max_new_tokens=20) as session:
        await session.propose(after(NUM_PROMPT, *answer[:2]))  # nodes 0, 1; commits three tokens
        await session.commit()
        await session.propose(after(NUM_PROMPT, *answer[:6]))  # as if sent before the commit arrived
        commit = await session.commit()
        assert list(commit.token_ids) == answer[3:7]
        assert (commit.num_draft_tokens, commit.num_accepted_tokens) == (3, 3)
        await session.propose(below(1, *answer[2:10]))  # its parent was committed long ago
        commit = await session.commit()
        assert list(commit.token_ids) == answer[7:11]
        assert commit.num_accepted_tokens == 3


async def test_lost_branches_are_ignored_in_step(peer: Peer) -> None:
    """A branch that disagrees with what was committed, and one from a dropped node, are no errors."""
    answer = peer.answer
    async with peer.session(max_new_tokens=20) as session:
        await session.propose(after(NUM_PROMPT, wrong(answer[0]), 7, 7))  # nodes 0 .. 2 lose
        await session.commit()
        await session.propose(after(NUM_PROMPT, wrong(answer[0]), 9))  # nodes 3, 4: too late
        await session.propose(below(2, 7, 7, 7))  # nodes 5 .. 7: behind a node that has lost
        await session.propose(below(6, 7))  # node 8: likewise
        await session.propose(after(NUM_PROMPT + 1, answer[1]), below(9, answer[2], answer[3]))  # node 9 lives
        commit = await session.commit()
        assert session.token_ids == answer[:5]
        assert (commit.num_draft_tokens, commit.num_accepted_tokens) == (3, 3)


async def test_more_than_the_tree_holds_is_cut_not_refused(peer: Peer) -> None:
    answer = peer.answer
    async with peer.session(max_new_tokens=100) as session:
        await session.propose(after(NUM_PROMPT, *answer, *[5] * (256 - len(answer))))
        await session.propose(below(255, 6, 6))
        commit = await session.commit()
        assert list(commit.token_ids[: len(answer)]) == answer


async def test_resumed_session_goes_on_with_the_same_tokens(peer: Peer) -> None:
    """Tokens depend on position and seed alone: a new stream from what is committed continues the old one."""
    answer = peer.answer
    for num_committed in (1, 7, 23):
        async with raw_session(peer.address) as session:
            prompt = [*PROMPT, *answer[:num_committed]]
            left = len(answer) - num_committed
            await session.open(
                peer.opening(prompt_token_ids=prompt, num_committed_tokens=num_committed, max_new_tokens=left)
            )
            while not session.commits or not session.commits[-1].finish_reason:
                await session.propose()
                await session.commit()
            assert session.token_ids == answer[num_committed:]
            assert session.commits[0].position == NUM_PROMPT + num_committed


async def test_stop_token_ends_the_stream(peer: Peer) -> None:
    answer = peer.answer
    place = next(i for i in range(2, 10) if answer[i] not in answer[:i])
    async with peer.session(stop_token_ids=[answer[place]]) as session:
        await session.propose(after(NUM_PROMPT, *answer[:11]))
        commit = await session.commit()
        assert list(commit.token_ids) == answer[: place + 1]
        assert commit.finish_reason == pb.FINISH_REASON_STOP
        with pytest.raises(EOFError):
            await session.read()


async def test_running_ahead_does_not_wait_for_proposals(peer: Peer) -> None:
    """A draft that says nothing costs nothing: the target goes on by itself. What comes late is no error."""
    answer = peer.answer
    async with peer.session(schedule=pb.SCHEDULE_ASYNC, max_new_tokens=24) as session:
        await session.propose(after(NUM_PROMPT, answer[0], wrong(answer[1])))
        while not session.commits or not session.commits[-1].finish_reason:
            await session.commit()
        assert session.token_ids == answer


async def test_drafts_on_their_way_find_the_stream_open(peer: Peer) -> None:
    """The target has finished, and the draft, which has not read of it yet, goes on writing.

    A write that meets a closed stream fails the call as a whole ("Internal error from Core"), with the last commits
    unread; under load, requests died of it at their end.
    """
    answer = peer.answer
    async with peer.session(schedule=pb.SCHEDULE_ASYNC, max_new_tokens=5) as session:
        for _ in range(40):
            await session.propose(after(NUM_PROMPT, answer[0]))
            await asyncio.sleep(0.01)
        while not session.commits or not session.commits[-1].finish_reason:
            await session.commit()
        assert session.token_ids == answer[:5]


REFUSED_OPENS = {
    "another protocol version": ({"protocol_version": 2}, "FAILED_PRECONDITION", ["version 2", "1"]),
    "no protocol version": ({"protocol_version": 0}, "FAILED_PRECONDITION", ["version 0"]),
    "another tokenizer": ({"tokenizer_fingerprint": "0123456789abcdef"}, "FAILED_PRECONDITION", ["0123456789abcdef"]),
    "another vocabulary size": ({"vocab_size": 300}, "FAILED_PRECONDITION", ["300", "288"]),
    "no prompt": ({"prompt_token_ids": []}, "INVALID_ARGUMENT", ["prompt has no token"]),
    "a prompt as long as the context": (
        {"prompt_token_ids": [2] * MAX_LENGTH},
        "INVALID_ARGUMENT",
        [str(MAX_LENGTH), str(MAX_LENGTH - 1)],
    ),
    "a prompt outside the vocabulary": ({"prompt_token_ids": [2, 288]}, "INVALID_ARGUMENT", ["288"]),
    "all of the prompt committed": ({"num_committed_tokens": NUM_PROMPT}, "INVALID_ARGUMENT", [str(NUM_PROMPT)]),
    "no room for output": ({"max_new_tokens": 0}, "INVALID_ARGUMENT", ["max_new_tokens 0"]),
    "no seed": ({"sampling": pb.SamplingParams(temperature=1.0)}, "INVALID_ARGUMENT", ["seed"]),
    "no sampling at all": ({"sampling": None}, "INVALID_ARGUMENT", ["seed"]),
    "temperature below 0": (
        {"sampling": pb.SamplingParams(temperature=-1, seed=1)},
        "INVALID_ARGUMENT",
        ["temperature -1"],
    ),
    "temperature not a number": (
        {"sampling": pb.SamplingParams(temperature=float("nan"), seed=1)},
        "INVALID_ARGUMENT",
        ["temperature nan"],
    ),
    "temperature infinite": (
        {"sampling": pb.SamplingParams(temperature=float("inf"), seed=1)},
        "INVALID_ARGUMENT",
        ["temperature inf"],
    ),
    "top_p 0": ({"sampling": pb.SamplingParams(top_p=0, seed=1)}, "INVALID_ARGUMENT", ["top_p 0"]),
    "min_p above 1": ({"sampling": pb.SamplingParams(min_p=1.5, seed=1)}, "INVALID_ARGUMENT", ["min_p 1.5", "1]"]),
    "unknown schedule": ({"schedule": 9}, "INVALID_ARGUMENT", ["schedule 9"]),
}


@pytest.mark.parametrize(("fields", "code", "parts"), REFUSED_OPENS.values(), ids=REFUSED_OPENS)
async def test_refused_open(peer: Peer, fields: dict[str, Any], code: str, parts: list[str]) -> None:
    """One clear status that names the value and the limit."""
    status, message = await peer.failure(pb.VerifyRequest(open=peer.opening(**fields)))
    assert status.name == code
    assert all(part in message for part in parts), message
    assert "\n" not in message


async def test_mismatch_names_both_sides(peer: Peer) -> None:
    message = (await peer.failure(pb.VerifyRequest(open=peer.opening(tokenizer_fingerprint="ffff"))))[1]
    assert "ffff" in message
    assert peer.card.tokenizer_fingerprint in message


REFUSED_PROPOSALS = {
    "a node that was never proposed": ([below(0, 5)], ["node 0", "0 nodes"]),
    "a node of a later branch": ([after(NUM_PROMPT, 5), below(0, 5), below(3, 5)], ["node 3", "2 nodes"]),
    "a prefix longer than the sequence": ([after(NUM_PROMPT + 1, 5)], [str(NUM_PROMPT + 1), str(NUM_PROMPT)]),
    "a token outside the vocabulary": ([after(NUM_PROMPT, 5, VOCAB_SIZE)], ["288"]),
    "a branch longer than the tree": ([after(NUM_PROMPT, *[5] * 257)], ["257", "256"]),
    "a branch without a parent": ([pb.Branch(token_ids=[5])], ["no parent"]),
    "a branch without a token": ([after(NUM_PROMPT)], ["no token"]),
}


@pytest.mark.parametrize(("branches", "parts"), REFUSED_PROPOSALS.values(), ids=REFUSED_PROPOSALS)
async def test_refused_proposal(peer: Peer, branches: list[pb.Branch], parts: list[str]) -> None:
    status, message = await peer.failure(pb.VerifyRequest(open=peer.opening()), proposing(*branches))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert all(part in message for part in parts), message


async def test_messages_out_of_order(peer: Peer) -> None:
    first = pb.VerifyRequest(open=peer.opening())
    for messages in ([proposing()], [pb.VerifyRequest()], [first, first], [first, pb.VerifyRequest()]):
        status, _ = await peer.failure(*messages)
        assert status is grpc.StatusCode.INVALID_ARGUMENT


async def test_closing_without_a_word(peer: Peer) -> None:
    """A client that closes its side before, or in the middle, is told so; the session ends at once."""
    for messages in ([], [pb.VerifyRequest(open=peer.opening())]):
        async with raw_session(peer.address) as session:
            for message in messages:
                await session.call.write(message)
            await session.call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await session.drain()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_bad_session_does_not_disturb_others(peer: Peer) -> None:
    answer = peer.answer
    async with peer.session() as good:
        await good.propose(after(NUM_PROMPT, *answer[:3]))
        await asyncio.gather(
            *(peer.failure(pb.VerifyRequest(open=peer.opening()), proposing(below(7, 1))) for _ in range(4))
        )
        await good.commit()
        await good.propose()
        await good.commit()
        assert good.token_ids == answer[:5]


async def test_sixteen_sessions_share_eight_slots(peer: Peer) -> None:
    """More sessions than slots: the later ones wait for their turn, none mixes with another."""
    answer = peer.answer

    async def run(number: int) -> list[int]:
        async with raw_session(peer.address) as session:
            await session.call.write(pb.VerifyRequest(open=peer.opening(max_new_tokens=12)))
            return await _play(session, answer, lead=number % 4)

    outputs = await asyncio.gather(*(run(number) for number in range(16)))
    assert outputs == [answer[:12]] * 16


async def _play(session: RawSession, answer: list[int], *, lead: int) -> list[int]:
    """Propose `lead` right tokens and a wrong one per round."""
    assert (await session.read()).WhichOneof("message") == "opened"
    while not session.commits or not session.commits[-1].finish_reason:
        done = len(session.token_ids)
        await session.propose(after(NUM_PROMPT + done, *answer[done : done + lead], wrong(answer[done + lead])))
        await session.commit()
    return session.token_ids
