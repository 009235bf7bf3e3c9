"""How draft tokens become branches: both sides number nodes in the order of their tokens, so no number is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from grpc_comm.specdec.v1 import specdec_pb2 as pb
from inference.engine.draft_session import DraftSession, Growth


class ProposalSender:
    """Sends the drafts of one session.

    Args:
        send: takes each message to the target.
    """

    def __init__(self, send: Callable[[pb.Propose], Awaitable[None]]) -> None:
        self._send = send
        self._num_nodes = 0

    async def propose(self, prefix_length: int, token_ids: Sequence[int]) -> None:
        """Send a chain behind the first `prefix_length` tokens; an empty one asks for the target's own token."""
        branches = [pb.Branch(prefix_length=prefix_length, token_ids=token_ids)] if token_ids else []
        self._num_nodes += len(token_ids)
        await self._send(pb.Propose(branches=branches))

    async def grow(self, draft: DraftSession) -> None:
        """Send what the target was not told of."""
        growths = draft.take_unsent(self._num_nodes)
        self._num_nodes += sum(len(growth.token_ids) for growth in growths)
        await self._send(pb.Propose(branches=[_branch(growth) for growth in growths]))


def _branch(growth: Growth) -> pb.Branch:
    if growth.parent_node is None:
        return pb.Branch(prefix_length=growth.prefix_length, token_ids=growth.token_ids)
    return pb.Branch(parent_node=growth.parent_node, token_ids=growth.token_ids)
