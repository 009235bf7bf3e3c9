"""Sender of draft tokens as branches. Both sides count the tokens to number them, so messages carry no numbers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from grpc_comm.specdec.v1 import specdec_pb2 as pb
from inference.commit import Commit
from inference.engine.draft_session import DraftSession
from inference.scheduling.link import Echoes, Link
from inference.speculation.tree import Branch
from inference.workers.convert import branch_to_message


class ProposalSender:
    """Sender of one session's drafts.

    Args:
        send: sends one message to the target.
        link: times of the session's link to its target, which commits update.
    """

    def __init__(self, send: Callable[[pb.Propose], Awaitable[None]], link: Link) -> None:
        self._send = send
        self.link = link
        self._echoes = Echoes(link)
        self._num_nodes = 0

    async def propose(self, prefix_length: int, token_ids: Sequence[int]) -> None:
        """Send a chain after the first `prefix_length` tokens; an empty one requests the target's own token."""
        await self._propose([Branch(None, prefix_length, token_ids)] if token_ids else [])

    async def run(self, draft: DraftSession) -> None:
        """Send the session's draft tokens as they become due, until cancelled; `VerifyStream` reports a lost link."""
        while True:
            await draft.has_unsent()
            await self._propose(draft.take_unsent(self._num_nodes))

    async def _propose(self, branches: list[Branch]) -> None:
        num_tokens = sum(len(branch.token_ids) for branch in branches)
        self._num_nodes += num_tokens
        if num_tokens:
            self._echoes.sent(self._num_nodes, time.monotonic())
        await self._send(pb.Propose(branches=map(branch_to_message, branches)))

    def answered(self, commit: Commit) -> None:
        """Record the arrival of a commit."""
        self._echoes.received(commit.num_received_tokens, commit.hold_us / 1e6, time.monotonic())
