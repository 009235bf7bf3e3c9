"""How draft tokens become branches: both sides number nodes in the order of their tokens, so no number is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from grpc_comm.specdec.v1 import specdec_pb2 as pb


class ProposalSender:
    """Sends the chain of one session.

    Args:
        send: takes each message to the target.
    """

    def __init__(self, send: Callable[[pb.Propose], Awaitable[None]]) -> None:
        self._send = send
        self._num_nodes = 0

    async def propose(self, prefix_length: int, token_ids: Sequence[int]) -> None:
        """Send a chain behind the first `prefix_length` tokens; an empty one asks for the target's own token."""
        branches = [pb.Branch(prefix_length=prefix_length, token_ids=token_ids)] if token_ids else []
        await self._send_branches(branches, len(token_ids))

    async def extend(self, token_ids: Sequence[int]) -> None:
        """Send more of the chain whose last token was the last one sent."""
        await self._send_branches([pb.Branch(parent_node=self._num_nodes - 1, token_ids=token_ids)], len(token_ids))

    async def _send_branches(self, branches: Sequence[pb.Branch], num_tokens: int) -> None:
        self._num_nodes += num_tokens
        await self._send(pb.Propose(branches=branches))
