"""A draft worker of the pool: dials targets, and drafts for the sessions they hand over."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TypeAlias

import grpc

from grpc_comm.channel import open_channel
from grpc_comm.names import Addresses, addresses_of
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.caller import ANYBODY, harmless_id, serving
from inference.commit import Commit
from inference.config import PLAIN, DialSecurity
from inference.engine.draft import DraftEngine
from inference.engine.draft_session import DraftSession
from inference.engine.target import check_token_ids
from inference.errors import (
    CapacityError,
    HandshakeError,
    InvalidRequestError,
    RequestError,
    SpecDecError,
    UnavailableError,
)
from inference.observe.metrics import Metrics, RequestMetrics
from inference.request import Grammar, check_logit_bias
from inference.scheduling.round_trip import RoundTrip
from inference.text.vocabulary import Vocabulary
from inference.workers.convert import PROTOCOL_VERSION, commit_from_message, open_from_message
from inference.workers.dialling import check_link, credentials_of, named
from inference.workers.draft.proposals import ProposalSender
from inference.workers.draft.run_ahead import Runner, send_drafts
from inference.workers.status import calls_to

logger = logging.getLogger(__name__)

REDIAL_S = 1.0
REFUSED_S = 60.0
MAX_OUTBOX = 256
"""Messages that may wait for a target; whoever has more to say waits."""

AssistCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.AssistRequest, pb.AssistResponse]"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker offers a target.

    Attributes:
        vocabulary: of the draft.
        gamma: draft tokens of one pass at most, in every session that does not say.
        num_slots: sessions to offer room for.
        security: what it shows, and whom it trusts.
    """

    vocabulary: Vocabulary
    gamma: int
    num_slots: int
    security: DialSecurity = PLAIN


class PoolMember:
    """Drafts for the sessions of one target.

    Args:
        engine: drafts, also for other targets.
        address: HOST:PORT of the target.
        metrics: count the sessions.
    """

    def __init__(self, engine: DraftEngine, address: str, offer: Offer, metrics: Metrics) -> None:
        self._engine = engine
        self.address = address
        self._offer = offer
        self._metrics = metrics
        self._present: _Help | None = None
        self.is_refused = False
        """Whether it was, the last time that somebody answered."""

    @property
    def is_attached(self) -> bool:
        return self._present is not None

    async def run(self) -> None:
        """Draft for the target's sessions, redialling for ever when the link is lost.

        Raises:
            RequestError: the target refuses this worker; one that cannot be reached, or fails, is dialled again.
            HandshakeError: it is reached, and not trusted.
        """
        lost = False
        async with open_channel(self.address, credentials_of(self._offer.security)) as channel:
            stub = rpc.VerificationServiceStub(channel)
            while True:
                try:
                    await self._help(stub)
                except RequestError:
                    raise
                except SpecDecError as exc:
                    await check_link(self.address, self._offer.security)
                    if not lost:
                        logger.warning("no target, dialling until there is one: %s", exc)
                    lost = True
                else:
                    lost = False
                await asyncio.sleep(random.uniform(0.0, 2 * REDIAL_S))  # a fleet must not dial in step

    def resize(self, num_slots: int) -> None:
        """From now on there is room for so many sessions."""
        if num_slots != self._offer.num_slots:
            self._offer = replace(self._offer, num_slots=num_slots)
            if self._present is not None:
                self._present.resize(num_slots)

    async def _help(self, stub: rpc.VerificationServiceStub) -> None:
        """One stream, until it ends."""
        call, attach = stub.Assist(), self._attach()
        dialled = time.monotonic()
        try:
            with calls_to(self.address):
                await call.write(pb.AssistRequest(attach=attach))
                answer = await call.read()
                if isinstance(answer, pb.AssistResponse):
                    logger.info("attached as %s", answer.attached.worker_id)
                    self.is_refused = False
                    self._present = _Help(self._engine, call, self._offer, self._metrics)
                    if attach.num_slots != self._offer.num_slots:  # it was told meanwhile
                        self._present.resize(self._offer.num_slots)
                    await self._present.run(round_trip_s=time.monotonic() - dialled)
        finally:
            self._present = None
            call.cancel()

    def _attach(self) -> pb.Attach:
        words = self._offer.vocabulary
        return pb.Attach(
            protocol_version=PROTOCOL_VERSION,
            tokenizer_fingerprint=words.fingerprint,
            vocab_size=words.size,
            num_slots=self._offer.num_slots,
        )


class _Help:
    """The sessions on one stream."""

    def __init__(self, engine: DraftEngine, call: AssistCall, offer: Offer, metrics: Metrics) -> None:
        self._engine = engine
        self._call = call
        self._offer = offer
        self._metrics = metrics
        self._round_trip = RoundTrip()
        self._outbox: asyncio.Queue[pb.AssistRequest] = asyncio.Queue(MAX_OUTBOX)
        self._sessions: dict[str, _Helped] = {}

    def resize(self, num_slots: int) -> None:
        """Announce the new slot count to the target."""
        if not self._outbox.full():
            self._outbox.put_nowait(pb.AssistRequest(slots=pb.AssistSlots(num_slots=num_slots)))

    async def run(self, *, round_trip_s: float) -> None:
        """Draft until the stream ends."""
        self._round_trip.record(round_trip_s)
        writer = asyncio.create_task(self._write())
        try:
            while isinstance(message := await self._call.read(), pb.AssistResponse):
                self._handle(message)
        finally:
            writer.cancel()
            for session in self._sessions.values():
                session.close()

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._outbox.get())

    def _handle(self, message: pb.AssistResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "open":
            self._close(message.open.session_id)
            with serving(ANYBODY, harmless_id(message.open.request_id)):
                self._try(message.open.session_id, lambda: self._open(message.open))
        elif kind == "commit" and message.commit.session_id in self._sessions:
            self._try(message.commit.session_id, lambda: self._commit(message.commit))
        elif kind == "close":
            self._close(message.close.session_id)

    def _try(self, session_id: str, action: Callable[[], None]) -> None:
        """Do what a target says, of one session; what makes no sense ends that session's help, and nothing else."""
        try:
            action()
        except (CapacityError, RequestError, UnavailableError) as exc:
            context = self._sessions[session_id].context if session_id in self._sessions else copy_context()
            context.run(logger.warning, "session %s gets no draft: %s", session_id, exc)
            self._close(session_id)
            if not self._outbox.full():  # else its silence will tell
                self._outbox.put_nowait(pb.AssistRequest(decline=pb.AssistDecline(session_id=session_id)))

    def _close(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.close()

    def _commit(self, message: pb.AssistCommit) -> None:
        commit = commit_from_message(message.commit)
        # The draft step is shared with other targets.
        check_token_ids(commit.token_ids, vocab_size=self._offer.vocabulary.size)
        self._sessions[message.session_id].commit(commit)

    def _open(self, message: pb.AssistOpen) -> None:
        request = open_from_message(message.open)
        vocab_size = self._offer.vocabulary.size
        check_token_ids(request.prompt_token_ids, vocab_size=vocab_size)
        check_logit_bias(request.sampling, vocab_size=vocab_size)
        draft = self._engine.open(
            request.prompt_token_ids,
            request.law(),
            output_start=request.output_start,
            cache_salt=request.cache_salt,
        )
        gamma = self._offer.gamma if request.gamma is None else request.gamma
        runner = Runner(self._engine, draft, self._round_trip, gamma=gamma)

        async def send(propose: pb.Propose) -> None:
            proposal = pb.AssistPropose(session_id=message.session_id, propose=propose)
            await self._outbox.put(pb.AssistRequest(propose=proposal))

        proposals = ProposalSender(send, self._round_trip)
        end = len(request.prompt_token_ids) + request.max_new_tokens
        helped = _Helped(self._engine, draft, proposals, runner, self._metrics.request(), end)
        self._sessions[message.session_id] = helped
        if request.grammar is not None:
            helped.learn(request.grammar)


class _Helped:
    """One session that lives at the target."""

    def __init__(
        self,
        engine: DraftEngine,
        draft: DraftSession,
        proposals: ProposalSender,
        runner: Runner,
        metrics: RequestMetrics,
        end: int,
    ) -> None:
        self._metrics = metrics
        self._end = end
        self._engine = engine
        self._draft = draft
        self._proposals = proposals
        self._runner = runner
        self.context = copy_context()  # in which the log names the request
        self._sender = asyncio.create_task(send_drafts(draft, proposals))
        self._learner: asyncio.Task[None] | None = None

    def learn(self, grammar: Grammar) -> None:
        """Draft within a grammar, from when it is compiled: commits that come meanwhile must find the session."""
        self._learner = asyncio.create_task(self._learn(grammar))

    async def _learn(self, grammar: Grammar) -> None:
        try:
            self._draft.grammar = await self._engine.compiled(grammar)
        except SpecDecError as exc:  # the target took it: another version, or no room here
            logger.warning("a session is drafted for without its grammar: %s", exc)

    def commit(self, commit: Commit) -> None:
        """Apply a commit; one that crossed the opening on its way may repeat tokens that the opening had.

        Raises:
            InvalidRequestError: tokens before it are missing, or it exceeds the session's limit.
        """
        num_tokens, end = len(self._draft.committed), commit.position + len(commit.token_ids)
        if commit.position > num_tokens:
            raise InvalidRequestError(f"a commit is for position {commit.position}, {num_tokens} is next")
        if end > self._end:
            raise InvalidRequestError(f"a commit ends at position {end}, the session's limit is {self._end}")
        self._metrics.take(commit)
        self._proposals.answered(commit)
        self._runner.commit(commit, num_known=num_tokens - commit.position)

    def close(self) -> None:
        """Free the slot."""
        self._sender.cancel()
        if self._learner is not None:
            self._learner.cancel()
        self._metrics.left()
        self._engine.close(self._draft)


class PoolHelp:
    """Help for several targets at once, each with an equal share of the slots. Start it inside a running event loop.

    Args:
        engine: drafts.
        targets: HOST:PORT of each, dns:///NAME:PORT for all of a name, or file:///PATH for those of a list.
        offer: to all targets together.
        metrics: count the sessions.
    """

    def __init__(self, engine: DraftEngine, targets: Sequence[str], offer: Offer, metrics: Metrics) -> None:
        self._engine = engine
        self._offer = offer
        self._metrics = metrics
        self._members: dict[str, tuple[PoolMember, asyncio.Task[None]]] = {}
        self._task = asyncio.create_task(self._help_all(targets))

    @property
    def fault(self) -> str | None:
        """See `Work`."""
        if not any(member.is_attached for member, _ in self._members.values()):
            return self._engine.fault or "no target has this worker in its pool"
        return self._engine.fault

    @property
    def hangs(self) -> bool:
        """See `Work`."""
        return self._engine.hangs

    @property
    def broken(self) -> str | None:
        """See `Work`."""
        return self._engine.broken

    async def refused(self) -> None:
        """Wait for as long as one of the targets takes this worker.

        Raises:
            RequestError: the last of them refuses it.
        """
        await asyncio.shield(self._task)

    async def stop(self, *, grace_s: float) -> None:
        """Leave at once: the sessions live at their targets, and go on there."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _help_all(self, targets: Sequence[str]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                with calls_to(", ".join(targets)):
                    async for addresses in addresses_of(targets):
                        self._take(addresses, group)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the first ends the others

    def _take(self, addresses: Addresses, group: asyncio.TaskGroup) -> None:
        """There are these targets now."""
        for address in self._members.keys() - addresses.keys():
            self._members.pop(address)[1].cancel()
        share = max(1, self._offer.num_slots // max(1, len(addresses)))
        for member, _ in self._members.values():
            member.resize(share)
        for address in addresses.keys() - self._members.keys():
            security = named(self._offer.security, addresses[address])
            offer = replace(self._offer, num_slots=share, security=security)
            member = PoolMember(self._engine, address, offer, self._metrics)
            self._members[address] = member, group.create_task(self._help(member))

    async def _help(self, member: PoolMember) -> None:
        """Help one target; one that refuses the worker is asked again now and then, while there is another one."""
        while True:
            try:
                await member.run()
            except (RequestError, HandshakeError) as refusal:
                member.is_refused = True
                if all(each.is_refused for each, _ in self._members.values()):
                    raise
                logger.warning("goes on without a target that refuses it, or is not trusted: %s", refusal)
            await asyncio.sleep(REFUSED_S * random.uniform(0.5, 1.5))
