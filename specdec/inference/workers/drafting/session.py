"""Session of a draft worker, which drafts for one request of a target, either in rounds or ahead of verification.

A round drafts gamma tokens, sends them and waits until the target has verified them. A draft that runs ahead never
waits: while the target verifies, the draft extends its chain of tokens, up to a limit (the window) past the tokens of
the target's latest commit, and sends tokens soon after they are made. A commit that agrees with the chain shortens it;
any other commit begins a new chain. The target verifies the draft tokens that have arrived, and decodes by itself if
there are none, so it does not wait for a slow draft. If the round trip is long, the draft also sends branches, which
continue the chain in other ways: if the target chooses the first token of a branch, the next tokens are at the target
already.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import replace
from typing import TypeVar

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.commit import Commit, Counts
from specdec.inference.engine.draft import DraftEngine, TargetWords
from specdec.inference.errors import InvalidRequestError, SpecDecError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import GenerationRequest, Grammar
from specdec.inference.scheduling.link import Link
from specdec.inference.scheduling.pacing import Measured, Pacing, choose_pacing
from specdec.inference.speculation.tree import Branch
from specdec.inference.workers.calls.convert import branch_to_message

logger = logging.getLogger(__name__)

CommitT = TypeVar("CommitT", bound=Commit)

PROBE_AFTER = 16
"""Number of commits in a row for which the target had received no new draft token; after so many, the worker sends
draft tokens to measure the round trip, even if they do not pay."""


class ProposalSender:
    """Sender of one session's draft tokens to its target, as branches of the draft tree.

    Draft tokens are numbered in the order in which they are sent; a branch names the token before it by this number.

    Args:
        send: function that sends one message to the target.
        link: measured times of messages to the target and back, which each commit updates.

    Attributes:
        num_bytes: bytes of the messages sent since this count was last set to 0.
        num_nodes: number of draft tokens sent so far.
    """

    def __init__(self, send: Callable[[pb.Propose], Awaitable[None]], link: Link) -> None:
        self._send = send
        self.link = link
        self.num_bytes = 0
        self.num_nodes = 0

    async def propose(self, branches: list[Branch], step_s: float = 0.0) -> None:
        """Send branches of draft tokens to the target, and the time of one step of the draft model.

        An empty list makes the target decode a token without waiting for drafts.

        Args:
            branches: branches, each behind the one that it continues.
            step_s: seconds of a step; 0 if unknown.
        """
        num_tokens = sum(len(branch.token_ids) for branch in branches)
        self.num_nodes += num_tokens
        if num_tokens:
            self.link.sent(self.num_nodes, time.monotonic())
        message = pb.Propose(branches=map(branch_to_message, branches), step_us=round(step_s * 1e6))
        self.num_bytes += message.ByteSize()
        await self._send(message)

    def answered(self, commit: Commit) -> None:
        """Record that a commit has arrived; if the target got new draft tokens before it, measure the round trip."""
        self.link.received(commit.num_received_tokens, commit.hold_us / 1e6, time.monotonic())


class DraftingSession:
    """Session of a draft worker, which drafts for one request of a target as soon as this object is made.

    Args:
        engine: engine of the draft model.
        request: request as the target computes it; its prompt ends with the output tokens that are committed already.
            Its gamma is set, and its schedule decides between rounds and run-ahead.
        proposals: sender of the draft tokens.
        vocab_size: number of the target's token ids.
        words: the target's vocabulary, if it differs from the one that the engine was made for.
        metrics: metrics in which the session's commits are counted; None for a private worker, whose process counts
            its requests elsewhere.

    Attributes:
        context: context variables of the request, so that lines of the log about the session have the request's id.
        drafting: task that drafts until the session is closed; it fails with the draft engine's error.

    Raises:
        CapacityError, UnavailableError: the engine accepts no session.
    """

    def __init__(
        self,
        engine: DraftEngine,
        request: GenerationRequest,
        proposals: ProposalSender,
        *,
        vocab_size: int,
        words: TargetWords | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._engine = engine
        self._gamma = request.gamma or 0
        self._proposals = proposals
        self._draft = engine.open(
            request.prompt_token_ids,
            request.effective_sampling(),
            output_start=request.output_start,
            cache_salt=request.cache_salt,
            vocab_size=vocab_size,
            words=words,
        )
        self._words = words
        self._end = len(request.prompt_token_ids) + request.max_new_tokens
        self._metrics = None if metrics is None else metrics.request()
        self._num_unanswered = PROBE_AFTER  # measure at once: the opening took longer than a round trip
        self._is_heard = False
        self._committed = asyncio.Event()
        self._may_draft = asyncio.Event()
        self._may_draft.set()
        self._drafting_s = 0.0  # of the latest round
        self._waits_since = time.monotonic()  # for the next commit
        self.context = copy_context()
        self._in_rounds = request.schedule is not None and request.schedule.target_waits
        self.drafting = asyncio.create_task(self._rounds() if self._in_rounds else self._run_ahead())
        self._tasks = [self.drafting]
        if request.grammar is not None:  # in a task, since commits may come meanwhile
            self._tasks.append(asyncio.create_task(self._add_grammar(request.grammar)))

    @property
    def is_heard(self) -> bool | None:
        """Return True if a commit has shown that the target gets this session's draft tokens.

        Return False if many commits in a row show that it got none although some were sent, and None while unknown.
        """
        if self._is_heard:
            return True
        return False if self._num_unanswered >= 2 * PROBE_AFTER and self._proposals.num_nodes > 0 else None

    async def _add_grammar(self, grammar: Grammar) -> None:
        """Compile the request's grammar, and let the draft obey it from then on."""
        try:
            self._draft.grammar = await self._engine.compiled(grammar, self._words)
        except SpecDecError as exc:  # the target accepted it: versions differ, or this worker is busy
            logger.warning("a session is drafted for without its grammar: %s", exc)

    async def _run_ahead(self) -> None:
        """Send draft tokens to the target whenever the draft has some that are worth a message, until cancelled."""
        self._pace()
        while True:
            await self._draft.has_unsent()
            await self._proposals.propose(self._draft.take_unsent(self._proposals.num_nodes), self._engine.step_s)

    def hold(self, *, is_on: bool) -> None:
        """Stop drafting, or draft again.

        Args:
            is_on: True to stop after the running step of the draft model, and only follow the target's commits; False
                to draft again.
        """
        if not is_on:
            self._may_draft.set()
        else:
            self._may_draft.clear()
        if not self._in_rounds:
            self._pace()
        elif is_on:
            self._engine.pace(self._draft, Pacing())

    def _pace(self) -> None:
        """Set how many tokens the draft runs ahead, and how many branches it makes, by the measured times.

        While `hold` has stopped drafting, set both to none.
        """
        link = self._proposals.link
        measured = Measured(self._engine.step_s, link.pass_s, link.round_trip_s)
        pacing = choose_pacing(self._gamma, self._engine.num_branches, measured)
        if self._num_unanswered >= PROBE_AFTER:
            pacing = replace(pacing, num_ahead=0, min_gain=0.0)
        self._engine.pace(self._draft, pacing if self._may_draft.is_set() else Pacing())

    async def _rounds(self) -> None:
        """Draft gamma tokens, send them, and wait for the commit that answers them; repeat this until cancelled."""
        draft = self._draft
        while True:
            await self._may_draft.wait()
            began = time.monotonic()
            # The pass itself adds one token after the accepted ones.
            chain = await self._engine.propose(draft, min(self._gamma, self._end - len(draft.committed) - 1))
            self._waits_since = time.monotonic()
            self._drafting_s = self._waits_since - began
            self._committed.clear()
            await self._proposals.propose(
                [Branch(None, len(draft.committed), chain)] if chain else [], self._engine.step_s
            )
            await self._committed.wait()

    def commit(self, commit: CommitT) -> CommitT:
        """Let the draft continue after the tokens that the target has committed in one pass.

        Return the commit with the time and bytes that drafting took. The session may have got the commit's first tokens
        already, in the message that opened the session.

        Raises:
            InvalidRequestError: tokens before the commit are missing, or it goes beyond the request's last token.
        """
        draft, link = self._draft, self._proposals.link
        num_tokens, end = len(draft.committed), commit.position + len(commit.token_ids)
        if commit.position > num_tokens:
            raise InvalidRequestError(f"a commit is for position {commit.position}, {num_tokens} is next")
        if end > self._end:
            raise InvalidRequestError(f"a commit ends at position {end}, the session's limit is {self._end}")
        self._proposals.answered(commit)
        num_hits, num_wasted = draft.num_branch_hits, draft.num_wasted_tokens
        self._engine.commit(draft, commit.token_ids[num_tokens - commit.position :])
        link.record_pass(commit.timings.compute_us / 1e6)
        self._num_unanswered = 0 if commit.num_received_tokens else self._num_unanswered + (not commit.is_held)
        self._is_heard |= commit.num_received_tokens > 0
        if not self._in_rounds and self._may_draft.is_set():
            self._pace()
        self._committed.set()
        commit = self._with_figures(commit, draft.num_branch_hits - num_hits, draft.num_wasted_tokens - num_wasted)
        if self._metrics is not None:
            self._metrics.take(commit)
        return commit

    def _with_figures(self, commit: CommitT, num_hits: int, num_wasted: int) -> CommitT:
        proposals, pacing, now = self._proposals, self._draft.pacing, time.monotonic()
        waited_us = round((now - self._waits_since) * 1e6)
        timings = replace(
            commit.timings,
            network_us=max(0, waited_us - commit.timings.queue_us - commit.timings.compute_us),
            draft_us=round(self._drafting_s * 1e6),
            round_trip_us=round(proposals.link.round_trip_s * 1e6),
        )
        counts = Counts(
            bytes_up=proposals.num_bytes,
            num_branch_hits=num_hits,
            num_wasted_tokens=num_wasted,
            window=pacing.window,
            max_branches=pacing.branching.count,
        )
        self._waits_since, self._drafting_s, proposals.num_bytes = now, 0.0, 0
        return replace(commit, timings=timings, counts=counts)

    def close(self) -> None:
        """End the session, and free its slot of the draft engine."""
        for task in self._tasks:
            task.cancel()
        if self._metrics is not None:
            self._metrics.left()
        self._engine.close(self._draft)
