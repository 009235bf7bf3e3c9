"""A draft worker written against the .proto alone, as a stranger would write one: no code of inference/."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc

TIMEOUT_S = 30.0


def after(prefix_length: int, *token_ids: int) -> pb.Branch:
    """A branch behind the first tokens of the sequence."""
    return pb.Branch(prefix_length=prefix_length, token_ids=token_ids)


def below(parent_node: int, *token_ids: int) -> pb.Branch:
    """A branch behind an earlier draft token."""
    return pb.Branch(parent_node=parent_node, token_ids=token_ids)


@dataclass
class RawSession:
    """One Verify stream, and what was committed on it."""

    call: Any
    token_ids: list[int] = field(default_factory=list)
    commits: list[pb.Commit] = field(default_factory=list)

    async def open(self, message: pb.Open) -> pb.Opened:
        await self.call.write(pb.VerifyRequest(open=message))
        response = await self.read()
        assert response.WhichOneof("message") == "opened"
        opened: pb.Opened = response.opened
        return opened

    async def propose(self, *branches: pb.Branch) -> None:
        await self.call.write(pb.VerifyRequest(propose=pb.Propose(branches=branches)))

    async def read(self) -> pb.VerifyResponse:
        """The next message.

        Raises:
            EOFError: the target has ended the stream.
        """
        message = await self.call.read()
        if message == grpc.aio.EOF:
            raise EOFError
        response: pb.VerifyResponse = message
        return response

    async def drain(self) -> None:
        """Read to the end, which may be an error."""
        while await self.call.read() != grpc.aio.EOF:
            pass

    async def commit(self) -> pb.Commit:
        """The next commit."""
        response = await self.read()
        assert response.WhichOneof("message") == "commit"
        self.commits.append(response.commit)
        self.token_ids += response.commit.token_ids
        commit: pb.Commit = response.commit
        return commit

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ends, once it does."""
        return await self.call.code(), await self.call.details()


@asynccontextmanager
async def raw_session(address: str) -> AsyncGenerator[RawSession, None]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = rpc.VerificationServiceStub(channel).Verify(timeout=TIMEOUT_S)
        try:
            yield RawSession(call)
        finally:
            call.cancel()


async def failure(address: str, *messages: pb.VerifyRequest) -> tuple[grpc.StatusCode, str]:
    """The status of a stream that gets these messages."""
    async with raw_session(address) as session:
        for message in messages:
            await session.call.write(message)
        try:
            await session.drain()
        except grpc.aio.AioRpcError as exc:
            return exc.code(), exc.details() or ""
        return grpc.StatusCode.OK, ""


def proposing(*branches: pb.Branch) -> pb.VerifyRequest:
    return pb.VerifyRequest(propose=pb.Propose(branches=branches))


def positions(commits: Sequence[pb.Commit]) -> list[int]:
    return [commit.position for commit in commits]
