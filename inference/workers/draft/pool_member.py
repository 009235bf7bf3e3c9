"""A draft worker of the pool: dials targets, and drafts for the sessions they hand over."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import grpc

from grpc_comm.channel import open_channel
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.commit import Commit
from inference.config import PLAIN, DialSecurity
from inference.engine.draft import DraftEngine
from inference.engine.draft_session import DraftSession
from inference.engine.target import check_token_ids
from inference.errors import CapacityError, HandshakeError, RequestError, SpecDecError, UnavailableError
from inference.request import Grammar, check_logit_bias
from inference.scheduling.round_trip import RoundTrip
from inference.text.vocabulary import Vocabulary
from inference.workers.convert import PROTOCOL_VERSION, commit_from_message, open_from_message
from inference.workers.draft.proposals import ProposalSender
from inference.workers.draft.run_ahead import Runner, send_drafts
from inference.workers.remote import check_link, credentials_of
from inference.workers.status import calls_to

logger = logging.getLogger(__name__)

REDIAL_S = 1.0

AssistCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.AssistRequest, pb.AssistResponse]"


class PoolMember:
    """Drafts for the sessions of one target.

    Args:
        engine: drafts, also for other targets.
        address: HOST:PORT of the target.
        vocabulary: of the draft.
        gamma: draft tokens of one pass at most, in every session that does not say.
        num_slots: sessions to offer room for.
        security: what it shows, and whom it trusts.
    """

    def __init__(
        self,
        engine: DraftEngine,
        address: str,
        *,
        vocabulary: Vocabulary,
        gamma: int,
        num_slots: int,
        security: DialSecurity = PLAIN,
    ) -> None:
        self._engine = engine
        self._address = address
        self._security = security
        self._vocabulary = vocabulary
        self._gamma = gamma
        self._num_slots = num_slots

    async def run(self) -> None:
        """Draft for the target's sessions, redialling for ever when the link is lost.

        Raises:
            RequestError: the target refuses this worker; one that cannot be reached, or fails, is dialled again.
            HandshakeError: it is reached, and not trusted.
        """
        lost = False
        async with open_channel(self._address, credentials_of(self._security)) as channel:
            stub = rpc.VerificationServiceStub(channel)
            while True:
                try:
                    await self._help(stub)
                except RequestError:
                    raise
                except SpecDecError as exc:
                    await check_link(self._address, self._security)
                    if not lost:
                        logger.warning("no target, dialling until there is one: %s", exc)
                    lost = True
                else:
                    lost = False
                await asyncio.sleep(random.uniform(0.0, 2 * REDIAL_S))  # a fleet must not dial in step

    async def _help(self, stub: rpc.VerificationServiceStub) -> None:
        """One stream, until it ends."""
        call = stub.Assist()
        try:
            with calls_to(self._address):
                help_ = _Help(self._engine, call, gamma=self._gamma, vocab_size=self._vocabulary.size)
                await help_.run(self._attach())
        finally:
            call.cancel()

    def _attach(self) -> pb.Attach:
        return pb.Attach(
            protocol_version=PROTOCOL_VERSION,
            tokenizer_fingerprint=self._vocabulary.fingerprint,
            vocab_size=self._vocabulary.size,
            num_slots=self._num_slots,
        )


class _Help:
    """The sessions on one stream."""

    def __init__(self, engine: DraftEngine, call: AssistCall, *, gamma: int, vocab_size: int) -> None:
        self._engine = engine
        self._call = call
        self._vocab_size = vocab_size
        self._gamma = gamma
        self._round_trip = RoundTrip()
        self._outbox: asyncio.Queue[pb.AssistRequest] = asyncio.Queue()
        self._sessions: dict[str, _Helped] = {}

    async def run(self, attach: pb.Attach) -> None:
        """Attach, and draft until the stream ends."""
        dialled = time.monotonic()
        await self._call.write(pb.AssistRequest(attach=attach))
        writer = asyncio.create_task(self._write())
        try:
            while isinstance(message := await self._call.read(), pb.AssistResponse):
                if message.WhichOneof("message") == "attached":
                    self._round_trip.record(time.monotonic() - dialled)
                    logger.info("attached as %s", message.attached.worker_id)
                else:
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
            logger.warning("session %s gets no draft: %s", session_id, exc)
            self._close(session_id)

    def _close(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.close()

    def _commit(self, message: pb.AssistCommit) -> None:
        commit = commit_from_message(message.commit)
        check_token_ids(commit.token_ids, vocab_size=self._vocab_size)  # the draft step is shared with other targets
        self._sessions[message.session_id].commit(commit)

    def _open(self, message: pb.AssistOpen) -> None:
        request = open_from_message(message.open)
        check_token_ids(request.prompt_token_ids, vocab_size=self._vocab_size)
        check_logit_bias(request.sampling, vocab_size=self._vocab_size)
        draft = self._engine.open(request.prompt_token_ids, request.law(), output_start=request.output_start)
        gamma = self._gamma if request.gamma is None else request.gamma
        runner = Runner(self._engine, draft, self._round_trip, gamma=gamma)

        async def send(propose: pb.Propose) -> None:
            self._outbox.put_nowait(
                pb.AssistRequest(propose=pb.AssistPropose(session_id=message.session_id, propose=propose))
            )

        proposals = ProposalSender(send, self._round_trip)
        helped = self._sessions[message.session_id] = _Helped(self._engine, draft, proposals, runner)
        if request.grammar is not None:
            helped.learn(request.grammar)


class _Helped:
    """One session that lives at the target."""

    def __init__(self, engine: DraftEngine, draft: DraftSession, proposals: ProposalSender, runner: Runner) -> None:
        self._engine = engine
        self._draft = draft
        self._proposals = proposals
        self._runner = runner
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
        """Apply a commit; one that crossed the opening on its way may repeat tokens that the opening had."""
        self._proposals.answered(commit)
        self._runner.commit(commit, num_known=len(self._draft.committed) - commit.position)

    def close(self) -> None:
        """Free the slot."""
        self._sender.cancel()
        if self._learner is not None:
            self._learner.cancel()
        self._engine.close(self._draft)


class PoolHelp:
    """Help for several targets at once, each with an equal share of the slots. Start it inside a running event loop.

    Args:
        engine: drafts.
        addresses: HOST:PORT of each target.
        vocabulary, gamma, security: see `PoolMember`.
        num_slots: sessions to offer room for, to all targets together.
    """

    fault = broken = None

    def __init__(
        self,
        engine: DraftEngine,
        addresses: Sequence[str],
        *,
        vocabulary: Vocabulary,
        gamma: int,
        num_slots: int,
        security: DialSecurity = PLAIN,
    ) -> None:
        share = max(1, num_slots // len(addresses))
        members = [
            PoolMember(engine, address, vocabulary=vocabulary, gamma=gamma, num_slots=share, security=security)
            for address in addresses
        ]
        self._task = asyncio.create_task(_help_all(members))

    async def refused(self) -> None:
        """Wait for as long as one of the targets takes this worker.

        Raises:
            RequestError: the last of them refuses it.
            HandshakeError: or is not trusted.
        """
        await asyncio.shield(self._task)

    async def stop(self, *, grace_s: float) -> None:
        """Leave at once: the sessions live at their targets, and go on there."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def _help_all(members: Sequence[PoolMember]) -> None:
    helping = {asyncio.create_task(member.run()) for member in members}
    try:
        while True:
            ended, helping = await asyncio.wait(helping, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                _go_on_without(task, is_last=not helping)
    finally:
        for task in helping:
            task.cancel()


def _go_on_without(member: asyncio.Task[None], *, is_last: bool) -> None:
    """Log why a target refuses the worker; raise it if there is no other target left."""
    try:
        member.result()
    except (RequestError, HandshakeError) as refusal:
        if is_last:
            raise
        logger.warning("goes on without a target that refuses it, or is not trusted: %s", refusal)
