"""The draft worker's side of a Verify stream: proposals up, commits down, bytes counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc

from grpc_comm.call import CAN_MOVE
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.commit import NOTHING_COUNTED, Answer, Commit, Counts, Opened
from inference.engine.draft_session import DraftSession
from inference.errors import IncompatibleDraftError, SpecDecError, UnavailableError
from inference.request import UNKNOWN, GenerationRequest, Provenance
from inference.scheduling.link import Link
from inference.text.vocabulary import Vocabulary
from inference.workers.convert import all_logprobs, commit_from_message, open_to_message
from inference.workers.draft.proposals import ProposalSender
from inference.workers.fleet import Replica
from inference.workers.output import Output
from inference.workers.status import calls_to

_FRAME_BYTES = 5  # gRPC's length prefix of each message


@dataclass(slots=True)
class StreamState:
    """`Progress` of a draft worker's request: state that each stream inherits from the one before it.

    Attributes:
        provenance: origin of its tokens; fields are empty until the first target has named them.
        draft: draft session of the request, which outlives the streams.
        has_begun: True once any target has opened the session.
        answered: True if the latest target opened the session.
        is_cautious: True if the next stream drafts only after the answer to Open. Drafting earlier saves a round trip,
            but a write that meets a refusal hides it (grpc issue 36066), so the stream after such a loss waits.
        has_opened: True once the client has the Opened event.
    """

    provenance: Provenance = UNKNOWN
    draft: DraftSession | None = None
    has_begun: bool = False
    answered: bool = False
    is_cautious: bool = False
    has_opened: bool = False
    has_ended: bool = False

    @property
    def closing(self) -> None:
        """See `Progress`; the last commit has the finish reason, so no event follows it."""
        return None

    def take(self, event: Answer) -> bool:
        """See `Progress`."""
        if isinstance(event, Opened):
            is_news, self.has_opened = not self.has_opened, True
            return is_news
        self.has_ended = event.finish_reason is not None
        return True

    def lost(self, exc: SpecDecError) -> None:
        """See `Progress`; the target is not at fault if the draft session has ended.

        Raises:
            SpecDecError: the draft session has ended: this server is shutting down, or its draft fails on the request.
        """
        self.is_cautious = not self.answered
        if self.draft is not None and self.draft.error is not None:
            raise self.draft.error


class VerifyStream:
    """One session at a remote target, whose times are measured as those of `link`."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[pb.VerifyRequest, pb.VerifyResponse],
        address: str,
        state: StreamState,
        link: Link,
    ) -> None:
        self._call = call
        self._address = address
        self._state = state
        self.proposals = ProposalSender(self._propose, link)
        self._bytes_up = 0
        self._bytes_down = 0
        self.opened: Opened | None = None
        """Opened event of the session; None before the first commit."""
        self._has_grammar = False
        self._num_cached_tokens = 0

    async def open(self, request: GenerationRequest, vocabulary: Vocabulary) -> None:
        """Send Open; drafting begins at once, and only a cautious stream waits for the answer.

        Args:
            vocabulary: tokenizer of the draft, and size of the target's vocabulary, which its commits are checked by.
        """
        self._opened_at = time.monotonic()
        self._state.answered = False
        self._vocab_size, self._num_prompt_tokens = vocabulary.size, len(request.prompt_token_ids)
        self._output = Output(self._address, limit=request.max_new_tokens, position=self._num_prompt_tokens)
        message = open_to_message(request, fingerprint=vocabulary.fingerprint, vocab_size=vocabulary.size)
        message.model_id = self._state.provenance.model_id
        self._has_grammar = request.grammar is not None
        if self._has_grammar:
            message.grammar.version = self._state.provenance.grammar_version
        await self._write(pb.VerifyRequest(open=message))
        if self._state.is_cautious:
            self._take_opened(await self._read())

    async def commit(self) -> Commit:
        """Return the next commit."""
        message = await self._read()
        if message.WhichOneof("message") == "opened":
            self._take_opened(message)
            message = await self._read()
        commit = await self._output.converted(commit_from_message, message.commit, ())
        self._check(commit)
        if self.opened is None:
            scores = message.commit.prompt_logprobs
            scores_of_prompt = await self._output.converted(all_logprobs, scores, scores)
            self.opened = Opened(self._num_cached_tokens, scores_of_prompt, self._state.provenance)
        self.proposals.answered(commit)
        return commit

    def _take_opened(self, message: pb.VerifyResponse) -> None:
        """Record the answer to Open, which the target sends at once: its time is a round trip."""
        self.proposals.link.record_round_trip(time.monotonic() - self._opened_at)
        opened = message.opened
        self._state.provenance = Provenance(opened.model_id, opened.grammar_version)
        self._state.has_begun = self._state.answered = True
        self._num_cached_tokens = min(opened.num_cached_tokens, self._num_prompt_tokens)
        if self._has_grammar and not opened.grammar_version:
            raise IncompatibleDraftError(
                "the target knows no grammars, and would answer without", address=self._address
            )

    def _check(self, commit: Commit) -> None:
        """Check a commit against the vocabulary and the commits before it.

        Raises:
            UnavailableError: tokens are missing, too many, or outside the vocabulary. A new stream continues after
                the tokens taken.
        """
        if commit.token_ids and max(commit.token_ids) >= self._vocab_size:
            message = f"a commit holds token {max(commit.token_ids)}, outside the vocabulary of {self._vocab_size}"
            raise UnavailableError(message, address=self._address)
        self._output.take(commit)

    def with_figures(
        self, commit: Commit, *, wait_s: float, draft_s: float = 0.0, counts: Counts = NOTHING_COUNTED
    ) -> Commit:
        """Return the commit with its cost as the draft worker knows it, and set the byte counts back to 0.

        Args:
            wait_s: seconds waited for the commit; what the target did not spend of them was spent on the network.
            draft_s: seconds spent on drafting before.
            counts: counts of what became of the drafts.
        """
        spent_us = commit.timings.queue_us + commit.timings.compute_us
        timings = replace(
            commit.timings,
            draft_us=round(draft_s * 1e6),
            network_us=max(0, round(wait_s * 1e6) - spent_us),
            round_trip_us=round(self.proposals.link.round_trip_s * 1e6),
        )
        counts = replace(counts, bytes_up=self._bytes_up, bytes_down=self._bytes_down)
        self._bytes_up = self._bytes_down = 0
        return replace(commit, timings=timings, counts=counts)

    async def _propose(self, message: pb.Propose) -> None:
        await self._write(pb.VerifyRequest(propose=message))

    async def _write(self, message: pb.VerifyRequest) -> None:
        self._bytes_up += message.ByteSize() + _FRAME_BYTES
        try:
            with calls_to(self._address):
                await self._call.write(message)
        except asyncio.InvalidStateError:  # the call has ended already; reading raises the reason
            await self._read()

    async def _read(self) -> pb.VerifyResponse:
        with calls_to(self._address):
            message = await self._call.read()
        if not isinstance(message, pb.VerifyResponse):  # grpc.aio.EOF
            raise UnavailableError("the target closed the session before it was finished", address=self._address)
        self._bytes_down += message.ByteSize() + _FRAME_BYTES
        return message


@asynccontextmanager
async def verify_stream(
    target: Replica, state: StreamState, *, deadline_s: float, can_move: bool
) -> AsyncGenerator[VerifyStream, None]:
    """Open a Verify stream; leaving the block cancels it, which frees the target's slot.

    Args:
        can_move: whether the session could continue at another target.
    """
    stub = rpc.VerificationServiceStub(target.channel)
    call = stub.Verify(timeout=deadline_s, metadata=CAN_MOVE if can_move else None)
    target.link = Link(target.link)
    try:
        yield VerifyStream(call, target.address, state, target.link)
    finally:
        call.cancel()
